"""Ranks that shrink a group, as state machines, with events in any order that a test chooses.

A world delivers the messages of each pair of ranks in order. Messages of different pairs may arrive
in any order. The world kills ranks between two actions, and stops ranks for so long that other
ranks treat them as lost. An observation may be old when a rank handles it. The ledger is one word,
or votes of hosts, which ranks request over links that may be cut.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from unisono.rank_connections.paxos_acceptor import (
    Vote,
    VotePhase,
    VoteReply,
    VoteRequest,
    cast_in,
    unpack_reply,
    unpack_request,
)
from unisono.recovery import membership_agreement
from unisono.recovery.membership_agreement import (
    Advance,
    Advanced,
    Event,
    Finish,
    Form,
    Formed,
    GiveUp,
    MessageReceived,
    Observation,
    SendMessage,
)
from unisono.recovery.quorum import Poll, entry_of
from unisono.recovery.recovery_messages import pack, unpack

TIMEOUT_S = 10.0


class Forming:
    """A group that is being formed. After all members have entered, the first member completes the
    group on the other members.
    """

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.entered: set[int] = set()
        self.result: set[int] = set()


class World:
    """Simulated ranks, the messages between them, and the ledger."""

    def __init__(self, ranks: int, *, exclude: frozenset[int]) -> None:
        self.ranks, self.exclude = ranks, exclude
        self.now = 0.0
        self.states: dict[int, membership_agreement.AgreementState] = {}
        self.dead: set[int] = set()
        self.stopped: set[int] = set()
        self.todo: dict[int, deque[membership_agreement.Action]] = defaultdict(deque)
        self.messages: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self.ledger = 0
        self.formings: dict[int, Forming] = {}
        self.forming: dict[int, tuple[int, float]] = {}
        self.outcomes: dict[int, tuple[int, tuple[int, ...]] | None] = {}
        self.seen: dict[int, Observation] = {}

    # ---- events of a rank

    def start(self, rank: int) -> None:
        self.states[rank] = membership_agreement.begin(
            rank=rank, ranks=self.ranks, timeout_s=TIMEOUT_S, now=self.now, exclude=self.exclude
        )

    def runs(self, rank: int) -> bool:
        gone = rank in self.dead or rank in self.stopped or rank in self.outcomes
        return rank in self.states and not gone

    def step(self, rank: int, event: Event) -> None:
        self.states[rank], actions = membership_agreement.step(self.states[rank], event, self.now)
        self.todo[rank] += actions

    def observe(self, rank: int) -> None:
        self.step(rank, self.view(rank))

    def observe_late(self, rank: int) -> None:
        self.seen[rank] = self.view(rank)

    def view(self, rank: int) -> Observation:
        lost = self.dead | {r for r, found in self.outcomes.items() if found is None}
        return Observation(gone=frozenset(lost), entry=self.ledger)

    def deliver(self, source: int, rank: int) -> None:
        self.step(
            rank, MessageReceived(source=source, message=self.messages[source, rank].popleft())
        )

    def act(self, rank: int) -> None:
        match self.todo[rank].popleft():
            case SendMessage(to=to, message=message):
                assert unpack(pack(message), self.ranks) == message
                self.messages[rank, to].append(message)
            case Advance(expected=expected, desired=desired):
                seen = self.ledger
                if seen == expected:
                    self.ledger = desired
                self.step(rank, Advanced(expected=expected, desired=desired, seen=seen))
            case Form(ballot=ballot, members=members):
                forming_group = self.formings.setdefault(ballot, Forming(members))
                assert forming_group.members == members, "one ballot, two groups"
                assert rank not in forming_group.entered, "one ballot, two orders"
                forming_group.entered.add(rank)
                self.forming[rank] = (ballot, self.now)
            case Finish():
                state = self.states[rank]
                self.outcomes[rank] = (state.ready, state.members)
            case GiveUp():
                self.outcomes[rank] = None

    def form(self, rank: int, *, good: bool) -> bool:
        """Ends the formation of a group on this rank with success (`good`) or failure, if this
        result is possible now. Returns True if it was possible.
        """
        ballot, since = self.forming[rank]
        forming_group = self.formings[ballot]
        lost = any(r in self.dead or r in self.outcomes for r in forming_group.members)
        if not good:
            can_be = lost or self.now >= since + TIMEOUT_S
        elif rank == forming_group.members[0]:
            can_be = forming_group.entered == set(forming_group.members)
            forming_group.result |= forming_group.entered if can_be else set()
        else:
            can_be = rank in forming_group.result
        if not can_be:
            return False
        del self.forming[rank]
        self.step(rank, Formed(ballot=ballot, good=good))
        return True

    def moves(self) -> list[Callable[[], Any]]:
        """Returns all possible next steps, other than time, deaths and stops."""
        found: list[Callable[[], Any]] = []
        for rank in filter(self.runs, range(self.ranks)):
            if self.todo[rank]:
                found.append(lambda rank=rank: self.act(rank))
            elif rank in self.forming:
                found.append(lambda rank=rank: self.form(rank, good=True))
                found.append(lambda rank=rank: self.form(rank, good=False))
            else:
                found.append(lambda rank=rank: self.observe(rank))
                found.append(lambda rank=rank: self.observe_late(rank))
                if rank in self.seen:
                    found.append(lambda rank=rank: self.step(rank, self.seen.pop(rank)))
                found += [
                    lambda source=source, rank=rank: self.deliver(source, rank)
                    for source in range(self.ranks)
                    if self.messages[source, rank]
                ]
        return found

    # ---- end

    def settle(self) -> None:
        """Lets all live ranks finish, in a fair order and within bounded time."""
        self.stopped.clear()
        for rank in range(self.ranks):
            if rank not in self.states and rank not in self.dead | self.exclude:
                self.start(rank)
        for _ in range(400):
            self.round()
            if not any(map(self.runs, range(self.ranks))):
                return
            self.now += 0.5
        raise AssertionError(f"no end: {self.states}")

    def round(self) -> None:
        """Lets every running rank perform all its possible steps once."""
        for rank in filter(self.runs, range(self.ranks)):
            while self.todo[rank] and self.runs(rank):
                self.act(rank)
            if rank in self.forming and not self.form(rank, good=True):
                self.form(rank, good=False)
            if self.runs(rank) and rank not in self.forming:
                for source in range(self.ranks):
                    while self.messages[source, rank] and not self.todo[rank]:
                        self.deliver(source, rank)
                if not self.todo[rank]:
                    self.observe(rank)

    def check(self) -> list[int]:
        """Returns the ranks of the new group. Checks that they agree on the group, and that all are
        members.
        """
        finished = {rank: found for rank, found in self.outcomes.items() if found is not None}
        assert len(set(finished.values())) <= 1, finished
        for rank, (_, members) in finished.items():
            assert rank in members
            assert list(members) == sorted(members)
            assert not self.exclude & set(members)
        return sorted(finished)


class WorldOfHosts(World):
    """Ranks of several hosts, with the votes and polls of `CrossHostTransport`.

    `layout` has the host of each rank. An unreachable rank may be dead, beyond a cut, or alive
    while another host refuses connections at the rank's address. A rank that connects cannot
    distinguish these cases.
    """

    def __init__(self, layout: Sequence[int], exclude: frozenset[int] = frozenset()) -> None:
        super().__init__(len(layout), exclude=exclude)
        self.layout = tuple(layout)
        self.hosts = [
            frozenset(r for r in range(self.ranks) if layout[r] == host) for host in set(layout)
        ]
        self.words: dict[int, int] = defaultdict(int)
        """The vote of each host, in its shared memory."""
        self.left: dict[int, int] = {}
        """Ranks that have left the old group, with their host's vote at that time."""
        self.polls: dict[int, _RankPoll] = {}
        self.requests: dict[tuple[int, int], deque[VoteRequest | VoteReply | None]] = defaultdict(
            deque
        )
        self.severed: set[tuple[int, int]] = set()
        """Pairs that cannot reach each other; a cut is final."""

    def cut(self, side: frozenset[int]) -> None:
        """Separates the hosts of these ranks from the other hosts."""
        hosts = {self.layout[rank] for rank in side}
        within = {rank for rank in range(self.ranks) if self.layout[rank] in hosts}
        for a in within:
            for b in set(range(self.ranks)) - within:
                self.sever(a, b)

    def sever(self, a: int, b: int) -> None:
        """Cuts the connection between two ranks if they are on different hosts."""
        if self.layout[a] != self.layout[b]:
            self.severed |= {(a, b), (b, a)}
        for pair in self.severed:
            self.messages[pair].clear()
            self.requests[pair].clear()

    def unreachable(self, rank: int) -> set[int]:
        return self.dead | {other for other in range(self.ranks) if (rank, other) in self.severed}

    def can_start_again(self, rank: int) -> bool:
        """Returns True if a rank gave up and may try again."""
        over = rank in self.outcomes and self.outcomes[rank] is None
        return over and rank not in self.dead and rank not in self.left

    def start(self, rank: int) -> None:
        self.outcomes.pop(rank, None)
        # the rank has dropped the group that it had formed
        for forming_group in self.formings.values():
            forming_group.entered.discard(rank)
        super().start(rank)

    def leave(self, rank: int) -> None:
        """Lets a rank that has finished leave the old group. From now on it casts no votes. It only
        reports a decision that its vote knew before.
        """
        self.left.setdefault(rank, self.words[self.layout[rank]])

    def view(self, rank: int) -> Observation:
        quit_ = {r for r, found in self.outcomes.items() if found is None} - {rank}
        gone = self.unreachable(rank) | {r for r in quit_ if (rank, r) not in self.severed}
        return Observation(gone=frozenset(gone), entry=self.entry(rank))

    def entry(self, rank: int) -> int:
        return entry_of(Vote.of(self.words[self.layout[rank]]))

    def exchange(self, host: int, expected: int, desired: int) -> int:
        seen = self.words[host]
        if seen == expected:
            self.words[host] = desired
        return seen

    def cast(self, rank: int, request: VoteRequest) -> VoteReply:
        return cast_in(partial(self.exchange, self.layout[rank]), unpack_request(request.pack()))

    def act(self, rank: int) -> None:
        action = self.todo[rank][0]
        if isinstance(action, SendMessage) and (rank, action.to) in self.severed:
            self.todo[rank].popleft()
        elif isinstance(action, Advance):
            self.todo[rank].popleft()
            voters = [host - self.exclude for host in self.hosts]
            self.polls[rank] = _RankPoll(Poll(voters, action.expected, action.desired), action)
            self.poll(rank)
        else:
            super().act(rank)
            self.check()

    def poll(self, rank: int) -> None:
        """Runs one step of a rank that requests votes."""
        rank_poll = self.polls[rank]
        poll, action = rank_poll.poll, rank_poll.action
        if poll.request is not rank_poll.requested:
            rank_poll.requested = poll.request
            self.request_votes(rank, poll.request)
            poll.handle(rank, self.cast(rank, poll.request))
        elif poll.seen is not None or membership_agreement.decided(self.entry(rank)):
            del self.polls[rank]
            if poll.decision is not None:
                self.cast(rank, poll.decision)
                self.request_votes(rank, poll.decision)
            seen = self.entry(rank) if poll.seen is None else poll.seen
            result = Advanced(expected=action.expected, desired=action.desired, seen=seen)
            self.step(rank, result)
        elif not self.remote(rank) - poll.reached - self.unreachable(rank) - rank_poll.voteless:
            del self.polls[rank]
            self.outcomes[rank] = None  # too few votes are reachable

    def remote(self, rank: int) -> set[int]:
        there = {r for r in range(self.ranks) if self.layout[r] != self.layout[rank]}
        return there - self.exclude

    def request_votes(self, rank: int, request: VoteRequest) -> None:
        for to in self.remote(rank):
            if (rank, to) not in self.severed:
                self.requests[rank, to].append(request)

    def deliver_vote(self, source: int, to: int) -> None:
        """Delivers a request for a vote, or the reply."""
        match self.requests[source, to].popleft():
            case VoteRequest() as request if to in self.left:
                vote = Vote.of(self.left[to])
                if vote.decided:
                    decision = VoteRequest(
                        phase=VotePhase.DECIDED, ballot=vote.ballot, choice=vote.choice
                    )
                    self.requests[to, source].append(decision)
                if request.phase is not VotePhase.DECIDED:
                    self.requests[to, source].append(None)
            case VoteRequest() as request:
                reply = self.cast(to, request)
                if request.phase is not VotePhase.DECIDED:
                    self.requests[to, source].append(reply)
            case VoteReply() as reply if to in self.polls:
                self.polls[to].poll.handle(source, unpack_reply(reply.pack()))
            case None if to in self.polls:
                self.polls[to].voteless.add(source)

    def moves(self) -> list[Callable[[], Any]]:
        """Returns all possible next steps, other than time, deaths, cuts and stops."""
        asking = {rank for rank in self.polls if self.runs(rank)}
        found = [
            lambda s=source, t=to: self.deliver_vote(s, t)
            for (source, to), waiting in self.requests.items()
            if waiting and to not in self.dead | self.stopped
        ]
        found += [lambda rank=rank: self.poll(rank) for rank in asking]
        hidden, self.stopped = self.stopped, self.stopped | asking
        found += super().moves()
        self.stopped = hidden
        return found

    def round(self) -> None:
        for _ in range(4):
            for (source, to), waiting in list(self.requests.items()):
                while waiting and to not in self.dead | self.stopped:
                    self.deliver_vote(source, to)
            for rank in [rank for rank in self.polls if self.runs(rank)]:
                self.poll(rank)
        hidden, self.stopped = self.stopped, self.stopped | self.polls.keys()
        super().round()
        self.stopped = hidden


@dataclass
class _RankPoll:
    """A rank's pending poll, its latest request, and the ranks that reply without a vote."""

    poll: Poll
    action: Advance
    requested: VoteRequest | None = None
    voteless: set[int] = field(default_factory=set)

"""A model of ranks that shrink a group: states and events, in any order that a test chooses.

A world delivers messages in any order that keeps the order of each pair of ranks. It kills ranks
between any two actions, and stops some for so long that the others treat them as lost. The state
that a rank reads may be old when the rank acts on it. The agreement uses one word in memory, or
votes of hosts that are requested one by one, over links that may be cut.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from unisono.control.vote import (
    Vote,
    VotePhase,
    VoteReply,
    VoteRequest,
    cast_in,
    read_answer,
    read_ask,
)
from unisono.recovery import agreement
from unisono.recovery.agreement import (
    Advance,
    Advanced,
    Event,
    Finish,
    Form,
    Formed,
    GiveUp,
    Heard,
    Look,
    Send,
)
from unisono.recovery.messages import pack, unpack
from unisono.recovery.quorum import Poll, entry_of

TIMEOUT_S = 10.0


class Meeting:
    """A group in formation: all members enter, then the first member reports to the others."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.entered: set[int] = set()
        self.told: set[int] = set()


class World:
    """Ranks, the messages between them, and the agreed word."""

    def __init__(self, ranks: int, *, exclude: frozenset[int]) -> None:
        self.ranks, self.exclude = ranks, exclude
        self.now = 0.0
        self.states: dict[int, agreement.State] = {}
        self.dead: set[int] = set()
        self.stopped: set[int] = set()
        self.todo: dict[int, deque[agreement.Action]] = defaultdict(deque)
        self.mail: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self.ledger = 0
        self.meetings: dict[int, Meeting] = {}
        self.forming: dict[int, tuple[int, float]] = {}
        self.outcomes: dict[int, tuple[int, tuple[int, ...]] | None] = {}
        self.seen: dict[int, Look] = {}

    # ---- events of a rank

    def come(self, rank: int) -> None:
        self.states[rank] = agreement.begin(
            rank=rank, ranks=self.ranks, timeout_s=TIMEOUT_S, now=self.now, exclude=self.exclude
        )

    def runs(self, rank: int) -> bool:
        gone = rank in self.dead or rank in self.stopped or rank in self.outcomes
        return rank in self.states and not gone

    def step(self, rank: int, event: Event) -> None:
        self.states[rank], actions = agreement.step(self.states[rank], event, self.now)
        self.todo[rank] += actions

    def look(self, rank: int) -> None:
        self.step(rank, self.view(rank))

    def glance(self, rank: int) -> None:
        self.seen[rank] = self.view(rank)

    def view(self, rank: int) -> Look:
        lost = self.dead | {r for r, found in self.outcomes.items() if found is None}
        return Look(gone=frozenset(lost), entry=self.ledger)

    def deliver(self, source: int, rank: int) -> None:
        self.step(rank, Heard(source=source, message=self.mail[source, rank].popleft()))

    def act(self, rank: int) -> None:
        match self.todo[rank].popleft():
            case Send(to=to, message=message):
                assert unpack(pack(message), self.ranks) == message
                self.mail[rank, to].append(message)
            case Advance(expected=expected, desired=desired):
                seen = self.ledger
                if seen == expected:
                    self.ledger = desired
                self.step(rank, Advanced(expected=expected, desired=desired, seen=seen))
            case Form(ballot=ballot, members=members):
                meeting = self.meetings.setdefault(ballot, Meeting(members))
                assert meeting.members == members, "one ballot, two groups"
                assert rank not in meeting.entered, "one ballot, two orders"
                meeting.entered.add(rank)
                self.forming[rank] = (ballot, self.now)
            case Finish():
                state = self.states[rank]
                self.outcomes[rank] = (state.ready, state.members)
            case GiveUp():
                self.outcomes[rank] = None

    def form(self, rank: int, *, good: bool) -> bool:
        """Ends the formation of a group on this rank, if it can end with this result."""
        ballot, since = self.forming[rank]
        meeting = self.meetings[ballot]
        lost = any(r in self.dead or r in self.outcomes for r in meeting.members)
        if not good:
            can_be = lost or self.now >= since + TIMEOUT_S
        elif rank == meeting.members[0]:
            can_be = meeting.entered == set(meeting.members)
            meeting.told |= meeting.entered if can_be else set()
        else:
            can_be = rank in meeting.told
        if not can_be:
            return False
        del self.forming[rank]
        self.step(rank, Formed(ballot=ballot, good=good))
        return True

    def moves(self) -> list[Callable[[], Any]]:
        """Returns the possible next actions, except for time, deaths and stops."""
        found: list[Callable[[], Any]] = []
        for rank in filter(self.runs, range(self.ranks)):
            if self.todo[rank]:
                found.append(lambda rank=rank: self.act(rank))
            elif rank in self.forming:
                found.append(lambda rank=rank: self.form(rank, good=True))
                found.append(lambda rank=rank: self.form(rank, good=False))
            else:
                found.append(lambda rank=rank: self.look(rank))
                found.append(lambda rank=rank: self.glance(rank))
                if rank in self.seen:
                    found.append(lambda rank=rank: self.step(rank, self.seen.pop(rank)))
                found += [
                    lambda source=source, rank=rank: self.deliver(source, rank)
                    for source in range(self.ranks)
                    if self.mail[source, rank]
                ]
        return found

    # ---- the end

    def settle(self) -> None:
        """Runs all living ranks to their end, in a fair order and in bounded time."""
        self.stopped.clear()
        for rank in range(self.ranks):
            if rank not in self.states and rank not in self.dead | self.exclude:
                self.come(rank)
        for _ in range(400):
            self.round()
            if not any(map(self.runs, range(self.ranks))):
                return
            self.now += 0.5
        raise AssertionError(f"no end: {self.states}")

    def round(self) -> None:
        """Lets every running rank do each of its possible actions once."""
        for rank in filter(self.runs, range(self.ranks)):
            while self.todo[rank] and self.runs(rank):
                self.act(rank)
            if rank in self.forming and not self.form(rank, good=True):
                self.form(rank, good=False)
            if self.runs(rank) and rank not in self.forming:
                for source in range(self.ranks):
                    while self.mail[source, rank] and not self.todo[rank]:
                        self.deliver(source, rank)
                if not self.todo[rank]:
                    self.look(rank)

    def check(self) -> list[int]:
        """Returns the ranks that go on; asserts that they agree on one group that contains them
        all.
        """
        gone_on = {rank: found for rank, found in self.outcomes.items() if found is not None}
        assert len(set(gone_on.values())) <= 1, gone_on
        for rank, (_, members) in gone_on.items():
            assert rank in members
            assert list(members) == sorted(members)
            assert not self.exclude & set(members)
        return sorted(gone_on)


class SpanningWorld(World):
    """Ranks of several hosts, with the votes and polls of recovery across hosts.

    `layout` is each rank's host. An unreachable rank may be dead, behind a partition, or alive with
    an address at which another process refuses connections. All three appear equal to other ranks.
    """

    def __init__(self, layout: Sequence[int], exclude: frozenset[int] = frozenset()) -> None:
        super().__init__(len(layout), exclude=exclude)
        self.layout = tuple(layout)
        self.hosts = [
            frozenset(r for r in range(self.ranks) if layout[r] == host) for host in set(layout)
        ]
        self.words: dict[int, int] = defaultdict(int)
        """The vote of each host, in the memory that its ranks share."""
        self.left: dict[int, int] = {}
        """Ranks that have left the old group, with the word at that time."""
        self.polls: dict[int, _Polling] = {}
        self.questions: dict[tuple[int, int], deque[VoteRequest | VoteReply | None]] = defaultdict(
            deque
        )
        self.apart: set[tuple[int, int]] = set()
        """Pairs of ranks that do not reach each other; a cut is permanent."""

    def cut(self, side: frozenset[int]) -> None:
        """Cuts all links between the hosts of these ranks and the others."""
        hosts = {self.layout[rank] for rank in side}
        within = {rank for rank in range(self.ranks) if self.layout[rank] in hosts}
        for a in within:
            for b in set(range(self.ranks)) - within:
                self.sever(a, b)

    def sever(self, a: int, b: int) -> None:
        """Cuts the link between two ranks, if they are on two hosts."""
        if self.layout[a] != self.layout[b]:
            self.apart |= {(a, b), (b, a)}
        for pair in self.apart:
            self.mail[pair].clear()
            self.questions[pair].clear()

    def unreached(self, rank: int) -> set[int]:
        return self.dead | {other for other in range(self.ranks) if (rank, other) in self.apart}

    def can_come_again(self, rank: int) -> bool:
        """Returns True if the rank gave up and may try once more."""
        over = rank in self.outcomes and self.outcomes[rank] is None
        return over and rank not in self.dead and rank not in self.left

    def come(self, rank: int) -> None:
        self.outcomes.pop(rank, None)
        for meeting in self.meetings.values():  # the rank has dropped the group that it had formed
            meeting.entered.discard(rank)
        super().come(rank)

    def leave(self, rank: int) -> None:
        """Makes the rank close the old group after its recovery has ended."""
        self.left.setdefault(rank, self.words[self.layout[rank]])

    def view(self, rank: int) -> Look:
        quit_ = {r for r, found in self.outcomes.items() if found is None} - {rank}
        gone = self.unreached(rank) | {r for r in quit_ if (rank, r) not in self.apart}
        return Look(gone=frozenset(gone), entry=self.entry(rank))

    def entry(self, rank: int) -> int:
        return entry_of(Vote.of(self.words[self.layout[rank]]))

    def exchange(self, host: int, expected: int, desired: int) -> int:
        seen = self.words[host]
        if seen == expected:
            self.words[host] = desired
        return seen

    def cast(self, rank: int, ask: VoteRequest) -> VoteReply:
        return cast_in(partial(self.exchange, self.layout[rank]), read_ask(ask.pack()))

    def act(self, rank: int) -> None:
        action = self.todo[rank][0]
        if isinstance(action, Send) and (rank, action.to) in self.apart:
            self.todo[rank].popleft()
        elif isinstance(action, Advance):
            self.todo[rank].popleft()
            voters = [host - self.exclude for host in self.hosts]
            self.polls[rank] = _Polling(Poll(voters, action.expected, action.desired), action)
            self.poll(rank)
        else:
            super().act(rank)
            self.check()

    def poll(self, rank: int) -> None:
        """Runs one poll of a rank that requests votes."""
        polling = self.polls[rank]
        poll, action = polling.poll, polling.action
        if poll.ask is not polling.asked:
            polling.asked = poll.ask
            self.ask_away(rank, poll.ask)
            poll.hear(rank, self.cast(rank, poll.ask))
        elif poll.seen is not None or agreement.decided(self.entry(rank)):
            del self.polls[rank]
            if poll.decision is not None:
                self.cast(rank, poll.decision)
                self.ask_away(rank, poll.decision)
            seen = self.entry(rank) if poll.seen is None else poll.seen
            told = Advanced(expected=action.expected, desired=action.desired, seen=seen)
            self.step(rank, told)
        elif not self.away(rank) - poll.reached - self.unreached(rank) - polling.mute:
            del self.polls[rank]
            self.outcomes[rank] = None  # too few votes

    def away(self, rank: int) -> set[int]:
        there = {r for r in range(self.ranks) if self.layout[r] != self.layout[rank]}
        return there - self.exclude

    def ask_away(self, rank: int, ask: VoteRequest) -> None:
        for to in self.away(rank):
            if (rank, to) not in self.apart:
                self.questions[rank, to].append(ask)

    def carry(self, source: int, to: int) -> None:
        """Delivers a request to a vote, or a reply to the requesting rank."""
        match self.questions[source, to].popleft():
            case VoteRequest() as ask if to in self.left:
                vote = Vote.of(self.left[to])
                if vote.decided:
                    known = VoteRequest(step=VotePhase.KNOW, ballot=vote.ballot, choice=vote.choice)
                    self.questions[to, source].append(known)
                if ask.step is not VotePhase.KNOW:
                    self.questions[to, source].append(None)
            case VoteRequest() as ask:
                answer = self.cast(to, ask)
                if ask.step is not VotePhase.KNOW:
                    self.questions[to, source].append(answer)
            case VoteReply() as answer if to in self.polls:
                self.polls[to].poll.hear(source, read_answer(answer.pack()))
            case None if to in self.polls:
                self.polls[to].mute.add(source)

    def moves(self) -> list[Callable[[], Any]]:
        """Returns the possible next actions, except for time, deaths, cuts and stops."""
        asking = {rank for rank in self.polls if self.runs(rank)}
        found = [
            lambda s=source, t=to: self.carry(s, t)
            for (source, to), waiting in self.questions.items()
            if waiting and to not in self.dead | self.stopped
        ]
        found += [lambda rank=rank: self.poll(rank) for rank in asking]
        hidden, self.stopped = self.stopped, self.stopped | asking
        found += super().moves()
        self.stopped = hidden
        return found

    def round(self) -> None:
        for _ in range(4):
            for (source, to), waiting in list(self.questions.items()):
                while waiting and to not in self.dead | self.stopped:
                    self.carry(source, to)
            for rank in [rank for rank in self.polls if self.runs(rank)]:
                self.poll(rank)
        hidden, self.stopped = self.stopped, self.stopped | self.polls.keys()
        super().round()
        self.stopped = hidden


@dataclass
class _Polling:
    """A rank's pending poll, its last request, and the hosts without a vote."""

    poll: Poll
    action: Advance
    asked: VoteRequest | None = None
    mute: set[int] = field(default_factory=set)

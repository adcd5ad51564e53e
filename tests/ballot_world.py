"""Ranks that shrink a group, as states: what happens to them, in any order that a test chooses.

A world delivers their messages in any order that keeps those of a pair in order, kills ranks
between any two actions, and stops some for so long that the others take them for lost. What a rank
sees when it looks may be old when it thinks about it. Its ledger is one word, one for each rank, or
votes that are asked for one by one, over links that may be cut.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from unisono.links.vote import Answer, Ask, Vote, cast, read_answer, read_ask
from unisono.runtime import agreement
from unisono.runtime.agreement import (
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
    undecided,
)
from unisono.runtime.ballots import pack, unpack
from unisono.runtime.quorum import Poll

TIMEOUT_S = 10.0


class Meeting:
    """A group that is being formed: all enter, then its first member tells the others."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.entered: set[int] = set()
        self.told: set[int] = set()


class World:
    """Ranks, what is on its way between them, and the ledger: one, or one for each rank."""

    def __init__(self, ranks: int, *, private: bool = False, exclude: frozenset[int]) -> None:
        self.ranks, self.private, self.exclude = ranks, private, exclude
        self.now = 0.0
        self.states: dict[int, agreement.State] = {}
        self.dead: set[int] = set()
        self.stopped: set[int] = set()
        self.todo: dict[int, deque[agreement.Action]] = defaultdict(deque)
        self.mail: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self.ledgers: dict[int, int] = defaultdict(int)
        self.meetings: dict[int, Meeting] = {}
        self.forming: dict[int, tuple[int, float]] = {}
        self.outcomes: dict[int, tuple[int, tuple[int, ...]] | None] = {}
        self.seen: dict[int, Look] = {}

    # ---- what can happen to a rank

    def come(self, rank: int) -> None:
        self.states[rank] = agreement.begin(
            rank=rank, ranks=self.ranks, timeout_s=TIMEOUT_S, now=self.now, exclude=self.exclude
        )

    def runs(self, rank: int) -> bool:
        gone = rank in self.dead or rank in self.stopped or rank in self.outcomes
        return rank in self.states and not gone

    def ledger(self, rank: int) -> int:
        return rank if self.private else 0

    def step(self, rank: int, event: Event) -> None:
        self.states[rank], actions = agreement.step(self.states[rank], event, self.now)
        self.todo[rank] += actions

    def look(self, rank: int) -> None:
        self.step(rank, self.view(rank))

    def glance(self, rank: int) -> None:
        self.seen[rank] = self.view(rank)

    def view(self, rank: int) -> Look:
        entry = self.ledgers[self.ledger(rank)]
        gone_on = [found for found in self.outcomes.values() if found is not None]
        if self.private and gone_on:  # seen from outside, as a closed connection is
            entry = undecided(gone_on[0][0]) + 1
        lost = self.dead | {r for r, found in self.outcomes.items() if found is None}
        return Look(gone=frozenset(lost), entry=entry)

    def deliver(self, source: int, rank: int) -> None:
        self.step(rank, Heard(source=source, message=self.mail[source, rank].popleft()))

    def act(self, rank: int) -> None:
        match self.todo[rank].popleft():
            case Send(to=to, message=message):
                assert unpack(pack(message), self.ranks) == message
                self.mail[rank, to].append(message)
            case Advance(expected=expected, desired=desired):
                seen = self.ledgers[self.ledger(rank)]
                if seen == expected:
                    self.ledgers[self.ledger(rank)] = desired
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
        """Ends the forming of a group on this rank, if it can end so."""
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
        """What can happen next, but for time, deaths and stops."""
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
        """Lets all that live come to an end, in a fair order and within bounded time."""
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
        """Every rank that runs does all that it can, once."""
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
        """Those that go on: they have one answer, and all are in it."""
        gone_on = {rank: found for rank, found in self.outcomes.items() if found is not None}
        assert len(set(gone_on.values())) <= 1, gone_on
        for rank, (_, members) in gone_on.items():
            assert rank in members
            assert list(members) == sorted(members)
            assert not self.exclude & set(members)
        return sorted(gone_on)


class SpanningWorld(World):
    """Ranks of several hosts: what `SpanningTies` does, with the same votes and polls."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks, exclude=frozenset())
        self.votes: dict[int, Vote] = defaultdict(Vote)
        self.highest: dict[int, int] = defaultdict(int)
        self.polls: dict[int, tuple[Poll, Advance]] = {}
        self.questions: dict[tuple[int, int], deque[Ask | Answer]] = defaultdict(deque)
        self.apart: set[tuple[int, int]] = set()
        """Who does not reach whom; once cut, never again."""

    def cut(self, side: frozenset[int]) -> None:
        """Nothing passes any more between these ranks and the others."""
        for a in side:
            for b in set(range(self.ranks)) - side:
                self.apart |= {(a, b), (b, a)}
        for pair in self.apart:
            self.mail[pair].clear()
            self.questions[pair].clear()

    def ended(self, rank: int) -> frozenset[int]:
        """Who has ended, as far as this rank can be certain."""
        return frozenset(other for other in self.dead if (rank, other) not in self.apart)

    def unreached(self, rank: int) -> frozenset[int]:
        beyond = {other for other in range(self.ranks) if (rank, other) in self.apart}
        return frozenset(beyond | self.dead)

    def view(self, rank: int) -> Look:
        left = {r for r, found in self.outcomes.items() if found is None} - {rank}
        gone = self.unreached(rank) | {r for r in left if (rank, r) not in self.apart}
        return Look(gone=gone, entry=self.entry(rank))

    def entry(self, rank: int) -> int:
        vote = self.votes[rank]
        if vote.decided:
            return undecided(vote.choice) + 1
        return undecided(max(vote.promised, self.highest[rank]))

    def act(self, rank: int) -> None:
        action = self.todo[rank][0]
        if isinstance(action, Send) and (rank, action.to) in self.apart:
            self.todo[rank].popleft()
        elif isinstance(action, Advance):
            self.todo[rank].popleft()
            poll = Poll(rank, set(range(self.ranks)), action.expected, action.desired)
            self.polls[rank] = (poll, action)
            self.poll(rank)
        else:
            super().act(rank)
            self.check()

    def check(self) -> list[int]:
        """Of those who live now: when all that went on have ended, others may."""
        everything, living = self.outcomes, self.outcomes.items()
        self.outcomes = {rank: found for rank, found in living if rank not in self.dead}
        try:
            return super().check()
        finally:
            self.outcomes = everything

    def poll(self, rank: int) -> None:
        """One look of a rank that asks for votes."""
        poll, action = self.polls[rank]
        while poll.asks and poll.seen is None:
            self.put(rank, *poll.asks.pop(0), poll)
        poll.settle(self.ended(rank))
        if poll.asks and poll.seen is None:
            return
        if poll.seen is not None:
            del self.polls[rank]
            if poll.decision is not None:
                for to in range(self.ranks):
                    self.put(rank, to, poll.decision, poll)
            elif not agreement.decided(poll.seen):
                self.highest[rank] = max(self.highest[rank], poll.seen // 2)
            told = Advanced(expected=action.expected, desired=action.desired, seen=poll.seen)
            self.step(rank, told)
        elif set(range(self.ranks)) - poll.votes - self.ended(rank) <= self.unreached(rank):
            del self.polls[rank]
            self.outcomes[rank] = None  # too few

    def put(self, rank: int, to: int, ask: Ask, poll: Poll) -> None:
        if to == rank:
            self.votes[rank], answer = cast(self.votes[rank], ask)
            poll.hear(rank, answer)
        elif (rank, to) not in self.apart:
            self.questions[rank, to].append(ask)

    def carry(self, source: int, to: int) -> None:
        """Brings a question to a vote, or an answer to who asked."""
        match self.questions[source, to].popleft():
            case Ask() as ask:
                self.votes[to], answer = cast(self.votes[to], read_ask(ask.pack()))
                if ask.step.name != "KNOW":
                    self.questions[to, source].append(answer)
            case Answer() as answer if to in self.polls:
                self.polls[to][0].hear(source, read_answer(answer.pack()))

    def moves(self) -> list[Callable[[], Any]]:
        """What can happen next, but for time, deaths, cuts and stops."""
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

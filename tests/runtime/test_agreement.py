"""Who goes on: the agreement, against every order of events that hypothesis finds.

Ranks are states; a world delivers their messages in any order that keeps those of a pair in order,
kills ranks between any two actions, and stops some for so long that the others take them for lost.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from unisono.runtime.ballots import Go, Hold, Order, Report, pack, unpack

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
        entry = self.ledgers[self.ledger(rank)]
        gone_on = [found for found in self.outcomes.values() if found is not None]
        if self.private and gone_on:  # seen from outside, as a closed connection is
            entry = undecided(gone_on[0][0]) + 1
        lost = self.dead | {r for r, found in self.outcomes.items() if found is None}
        self.step(rank, Look(gone=frozenset(lost), entry=entry))

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


def play(world: World, data: st.DataObject, *, deaths: int, stops: int) -> None:
    for _ in range(data.draw(st.integers(0, 150))):
        moves = world.moves()
        absent = [r for r in range(world.ranks) if r not in world.states and r not in world.dead]
        moves += [lambda rank=rank: world.come(rank) for rank in absent]
        kinds = ["move"] * 12 + ["die"] * (deaths > 0) + ["stop"] * (stops > 0)
        match data.draw(st.sampled_from([*kinds, "wait"] if stops else kinds)):
            case "move" if moves:
                data.draw(st.sampled_from(moves))()
            case "die":
                world.dead.add(data.draw(st.integers(0, world.ranks - 1)))
                deaths -= 1
            case "stop":
                victim = data.draw(st.integers(0, world.ranks - 1))
                world.stopped ^= {victim}
                stops -= 1
            case "wait":
                world.now += data.draw(st.sampled_from([0.1, 4.0, 15.0]))
    world.settle()


def go_on_together(private: bool, ranks: int, deaths: int, data: st.DataObject) -> None:
    world = World(ranks, private=private, exclude=frozenset())
    play(world, data, deaths=deaths, stops=0)
    assert set(world.check()) | world.dead == set(range(ranks))
    early = [found for found in world.outcomes.values() if found is not None]
    assert not early or world.dead or early[0][1] == tuple(range(ranks))


def stay_one_group(ranks: int, data: st.DataObject) -> None:
    world = World(ranks, exclude=frozenset())
    play(world, data, deaths=1, stops=6)
    world.check()
    assert set(world.outcomes) | world.dead == set(range(ranks))


@pytest.mark.parametrize("private", [False, True])
@settings(max_examples=80, deadline=None)
@given(ranks=st.integers(1, 5), deaths=st.integers(0, 4), data=st.data())
def test_all_who_live_go_on_together(
    private: bool, ranks: int, deaths: int, data: st.DataObject
) -> None:
    go_on_together(private, ranks, deaths, data)


@settings(max_examples=120, deadline=None)
@given(ranks=st.integers(2, 5), data=st.data())
def test_ranks_that_were_stopped_never_make_two_groups(ranks: int, data: st.DataObject) -> None:
    stay_one_group(ranks, data)


@pytest.mark.slow
@settings(max_examples=4000, deadline=None)
@given(private=st.booleans(), ranks=st.integers(1, 5), deaths=st.integers(0, 4), data=st.data())
def test_at_length_all_who_live_go_on_together(
    private: bool, ranks: int, deaths: int, data: st.DataObject
) -> None:
    go_on_together(private, ranks, deaths, data)


@pytest.mark.slow
@settings(max_examples=4000, deadline=None)
@given(ranks=st.integers(2, 5), data=st.data())
def test_at_length_never_two_groups(ranks: int, data: st.DataObject) -> None:
    stay_one_group(ranks, data)


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(2, 5), data=st.data())
def test_the_excluded_are_in_no_group(ranks: int, data: st.DataObject) -> None:
    exclude = data.draw(st.frozensets(st.integers(0, ranks - 1), max_size=ranks - 1))
    world = World(ranks, exclude=exclude)
    for rank in set(range(ranks)) - exclude:
        world.come(rank)
    world.settle()
    assert world.check() == sorted(set(range(ranks)) - exclude)


def test_who_does_not_come_is_out_after_the_timeout() -> None:
    world = World(3, exclude=frozenset())
    world.come(1)
    world.come(2)
    world.stopped.add(0)  # has not come either
    while not world.outcomes:
        world.round()
        world.now += 0.25
    assert TIMEOUT_S < world.now < TIMEOUT_S + agreement.ANSWER_S
    world.settle()
    assert world.check() == [1, 2]
    assert world.outcomes[0] is None  # it came when all was over


def test_a_leader_that_waits_for_others_keeps_those_who_came_early() -> None:
    world = World(3, exclude=frozenset())
    arrivals = {2: 0.0, 0: 9.0, 1: 18.0}  # each within the timeout of the leader
    for quarter in range(100):
        world.now = quarter / 4
        for rank, at_s in arrivals.items():
            if rank not in world.states and at_s <= world.now:
                world.come(rank)
        world.round()
    assert world.check() == [0, 1, 2]


def test_who_takes_over_too_late_keeps_the_group_that_was_decided() -> None:
    lost, state = frozenset({0}), agreement.begin(rank=2, ranks=3, timeout_s=TIMEOUT_S, now=0)
    state, _ = agreement.step(state, Look(gone=lost, entry=0), 0)
    order = Order(out=lost, ballot=4, members=(1, 2))
    state, todo = agreement.step(state, Heard(source=1, message=order), 0)
    assert todo == (Form(ballot=4, members=(1, 2)),)
    state, _ = agreement.step(state, Formed(ballot=4, good=True), 0)
    for now in (1, 50):  # at last it takes rank 1 for lost
        state, todo = agreement.step(state, Look(gone=lost, entry=undecided(4)), now)
    advance = todo[-1]
    assert isinstance(advance, Advance) and advance.expected == undecided(4)
    decision = Advanced(expected=advance.expected, desired=advance.desired, seen=undecided(4) + 1)
    state, todo = agreement.step(state, decision, 50)
    assert todo == (Finish(),)
    assert (state.ready, state.members) == (4, (1, 2))


@pytest.mark.parametrize("text", [
    b"", b"{}", b"[]", b"7", b"null", b'{"kind": "boast", "out": []}', b"\xff\xfe", b"[" * 5000,
    b'{"kind": "go", "out": [9], "ballot": 2}', b'{"kind": "go", "out": [1, 1], "ballot": 2}',
    b'{"kind": "go", "out": [true], "ballot": 2}', b'{"kind": "go", "out": [], "ballot": -2}',
    b'{"kind": "go", "out": []}', b'{"kind": "hold", "out": [], "left_s": NaN}',
    b'{"kind": "hold", "out": [], "left_s": Infinity}', b'{"kind": ["go"], "out": []}',
    b'{"kind": "go", "out": [], "ballot": 2, "more": 1}', b" " * 70_000,
])  # fmt: skip
def test_texts_that_are_no_messages_are_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="message"):
        unpack(text, ranks=3)


@given(st.data())
def test_messages_come_through_as_they_are(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 300))
    out = data.draw(st.frozensets(st.integers(0, ranks - 1)))
    number = data.draw(st.integers(0, 1 << 40))
    members = data.draw(st.lists(st.integers(0, ranks - 1), unique=True))
    for message in (
        Report(out=out, ready=number),
        Hold(out=out, left_s=data.draw(st.floats(0, 1e6))),
        Order(out=out, ballot=number, members=tuple(members)),
        Go(out=out, ballot=number),
    ):
        assert unpack(pack(message), ranks) == message

"""The recovery agreement, with all orders of events that hypothesis finds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery_ranks import TIMEOUT_S, World
from unisono.recovery import membership_agreement
from unisono.recovery.membership_agreement import (
    Advance,
    Advanced,
    Finish,
    Form,
    Formed,
    MessageReceived,
    Observation,
    undecided,
)
from unisono.recovery.recovery_messages import FormOrder, Go, Hold, StatusReport, pack, unpack


def play(world: World, data: st.DataObject, *, deaths: int, stops: int) -> None:
    for _ in range(data.draw(st.integers(0, 150))):
        moves = world.moves()
        absent = [r for r in range(world.ranks) if r not in world.states and r not in world.dead]
        moves += [lambda rank=rank: world.start(rank) for rank in absent]
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


def finish_together(ranks: int, deaths: int, data: st.DataObject) -> None:
    world = World(ranks, exclude=frozenset())
    play(world, data, deaths=deaths, stops=0)
    assert set(world.check()) | world.dead == set(range(ranks))
    early = [found for found in world.outcomes.values() if found is not None]
    assert not early or world.dead or early[0][1] == tuple(range(ranks))


def stay_one_group(ranks: int, data: st.DataObject) -> None:
    world = World(ranks, exclude=frozenset())
    play(world, data, deaths=1, stops=6)
    world.check()
    assert set(world.outcomes) | world.dead == set(range(ranks))


@settings(max_examples=80, deadline=None)
@given(ranks=st.integers(1, 5), deaths=st.integers(0, 4), data=st.data())
def test_all_live_ranks_form_one_group(ranks: int, deaths: int, data: st.DataObject) -> None:
    finish_together(ranks, deaths, data)


@settings(max_examples=120, deadline=None)
@given(ranks=st.integers(2, 5), data=st.data())
def test_stopped_ranks_never_form_two_groups(ranks: int, data: st.DataObject) -> None:
    stay_one_group(ranks, data)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute of work, longer on a busy machine
@settings(max_examples=4000, deadline=None)
@given(ranks=st.integers(1, 5), deaths=st.integers(0, 4), data=st.data())
def test_at_length_all_live_ranks_form_one_group(
    ranks: int, deaths: int, data: st.DataObject
) -> None:
    finish_together(ranks, deaths, data)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute of work, longer on a busy machine
@settings(max_examples=4000, deadline=None)
@given(ranks=st.integers(2, 5), data=st.data())
def test_at_length_never_two_groups(ranks: int, data: st.DataObject) -> None:
    stay_one_group(ranks, data)


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(2, 5), data=st.data())
def test_excluded_ranks_are_in_no_group(ranks: int, data: st.DataObject) -> None:
    exclude = data.draw(st.frozensets(st.integers(0, ranks - 1), max_size=ranks - 1))
    world = World(ranks, exclude=exclude)
    for rank in set(range(ranks)) - exclude:
        world.start(rank)
    world.settle()
    assert world.check() == sorted(set(range(ranks)) - exclude)


def test_a_missing_rank_is_out_after_the_timeout() -> None:
    world = World(3, exclude=frozenset())
    world.start(1)
    world.start(2)
    world.stopped.add(0)  # rank 0 has not started either
    while not world.outcomes:
        world.round()
        world.now += 0.25
    assert TIMEOUT_S < world.now < TIMEOUT_S + membership_agreement.ANSWER_S
    world.settle()
    assert world.check() == [1, 2]
    assert world.outcomes[0] is None  # rank 0 started after the decision


def test_a_leader_that_waits_keeps_early_ranks() -> None:
    world = World(3, exclude=frozenset())
    # start times, each within the timeout after the one before
    arrivals = {2: 0.0, 0: 9.0, 1: 18.0}
    for quarter in range(100):
        world.now = quarter / 4
        for rank, at_s in arrivals.items():
            if rank not in world.states and at_s <= world.now:
                world.start(rank)
        world.round()
    assert world.check() == [0, 1, 2]


def test_a_rank_that_takes_over_too_late_keeps_the_decided_group() -> None:
    lost, state = (
        frozenset({0}),
        membership_agreement.begin(rank=2, ranks=3, timeout_s=TIMEOUT_S, now=0),
    )
    state, _ = membership_agreement.step(state, Observation(gone=lost, entry=0), 0)
    order = FormOrder(out=lost, ballot=4, members=(1, 2))
    state, todo = membership_agreement.step(state, MessageReceived(source=1, message=order), 0)
    assert todo == (Form(ballot=4, members=(1, 2)),)
    state, _ = membership_agreement.step(state, Formed(ballot=4, good=True), 0)
    for now in (1, 50):  # rank 2 finally treats rank 1 as lost
        state, todo = membership_agreement.step(
            state, Observation(gone=lost, entry=undecided(4)), now
        )
    advance = todo[-1]
    assert isinstance(advance, Advance) and advance.expected == undecided(4)
    decision = Advanced(expected=advance.expected, desired=advance.desired, seen=undecided(4) + 1)
    state, todo = membership_agreement.step(state, decision, 50)
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
def test_invalid_texts_are_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="message"):
        unpack(text, ranks=3)


@given(st.data())
def test_messages_survive_packing(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 300))
    out = data.draw(st.frozensets(st.integers(0, ranks - 1)))
    number = data.draw(st.integers(0, 1 << 40))
    members = data.draw(st.lists(st.integers(0, ranks - 1), unique=True))
    for message in (
        StatusReport(out=out, ready=number),
        Hold(out=out, left_s=data.draw(st.floats(0, 1e6))),
        FormOrder(out=out, ballot=number, members=tuple(members)),
        Go(out=out, ballot=number),
    ):
        assert unpack(pack(message), ranks) == message

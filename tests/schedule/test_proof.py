"""The fast proof agrees with a simple proof, and accepted schedules compute correct results."""

from __future__ import annotations

import re
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from oracle import is_right
from unisono.algorithms import build, names
from unisono.errors import ScheduleError, UnsupportedError
from unisono.execution.reference import run
from unisono.schedule import (
    Builder,
    Collective,
    Schedule,
    Transfer,
    Transfers,
    check,
    check_plans,
    chunk_moves,
    lower,
    proof,
)
from unisono.schedule.check import REPLAYED_CHUNKS
from unisono.types import DType, Op, ReduceOp

EVERY = [(op, name) for op in Op for name in names(op)]
PART = 8  # 8-byte elements in a part: 64 bytes, the unit to which part sizes are rounded up
NUMBERS = ("round", "src", "src_chunk", "dst", "dst_chunk", "count")
PLACE = r"rank -?\d+, chunk -?\d+, round -?\d+"


def mutated(data: st.DataObject, schedule: Schedule) -> Schedule:
    """Returns the schedule with one random change."""
    transfers = list(schedule.transfers)
    index = data.draw(st.integers(0, len(transfers) - 1))
    old = transfers[index]
    near = st.integers(-1, 2 + max(schedule.collective.ranks, schedule.num_locations))
    what = data.draw(st.sampled_from(["drop", "again", "field", "field", "reduce", "swap"]))
    if what == "drop":
        del transfers[index]
    elif what == "again":
        transfers.append(replace(old, round=data.draw(near)))
    elif what == "field":
        name = data.draw(st.sampled_from(NUMBERS))
        transfers[index] = replace(old, **{name: data.draw(near)})
    elif what == "reduce":
        transfers[index] = replace(old, reduce=not old.reduce)
    else:
        other = data.draw(st.integers(0, len(transfers) - 1))
        transfers[index] = replace(old, round=transfers[other].round)
        transfers[other] = replace(transfers[other], round=old.round)
    if data.draw(st.booleans()):
        transfers.sort(key=lambda t: t.round)
    return replace(schedule, transfers=transfers)


def passes(schedule: Schedule) -> bool:
    """Returns true if the proof accepts the schedule. Checks that a rejection names the place."""
    try:
        proof.prove(schedule)
    except ScheduleError as error:
        assert re.search(PLACE, str(error))
        return False
    return True


def run_and_compare(schedule: Schedule) -> None:
    """Runs the plans on random numbers, and compares the outputs with the definition."""
    collective, parts = schedule.collective, schedule.collective.parts
    rng = np.random.default_rng(1)

    def pieces(count: int) -> list[NDArray[Any]]:
        return [rng.integers(0, 1 << 40, parts * PART) for _ in range(count)]

    ranks = range(collective.ranks)
    inputs = [pieces(collective.input_pieces(rank)) for rank in ranks]
    outputs = [pieces(collective.output_pieces(rank)) for rank in ranks]
    expected = [[piece.copy() for piece in each] for each in outputs]
    for rank in ranks:
        for chunk, contributors in collective.expected(rank).items():
            piece, part = collective.output_ref(rank, chunk) or (0, 0)
            where = slice(part * PART, (part + 1) * PART)
            expected[rank][piece][where] = 0
            for source in contributors:
                of, at = collective.input_ref(source, chunk) or (0, 0)
                expected[rank][piece][where] += inputs[source][of][at * PART : (at + 1) * PART]
    run(
        lower(schedule),
        [[piece.view(np.uint8) for piece in each] for each in inputs],
        [[piece.view(np.uint8) for piece in each] for each in outputs],
        DType.INT64,
        ReduceOp.SUM,
        block_bytes=16,
        depth=1,
    )
    for rank in ranks:
        for found, wanted in zip(outputs[rank], expected[rank], strict=True):
            np.testing.assert_array_equal(found, wanted)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_mutations_are_rejected_or_harmless(data: st.DataObject) -> None:
    op, name = data.draw(st.sampled_from([pair for pair in EVERY if pair[0] is not Op.BARRIER]))
    ranks = data.draw(st.integers(2, 6))
    schedule = build(op, name, ranks=ranks, root=data.draw(st.integers(0, ranks - 1)))
    schedule = replace(schedule, scratch=data.draw(st.integers(0, 1)))
    for _ in range(data.draw(st.integers(1, 2))):
        if schedule.transfers:
            schedule = mutated(data, schedule)
    right = is_right(schedule)
    assert passes(schedule) is right
    if right:
        check(schedule)
        run_and_compare(schedule)


def random_schedule(data: st.DataObject) -> Schedule:
    """Draws a schedule with few ranks and few locations for values, so that many transfers
    conflict.
    """
    op = data.draw(st.sampled_from([op for op in Op if op is not Op.BARRIER]))
    ranks = data.draw(st.integers(1, 3))
    collective = Collective(op=op, ranks=ranks, root=0 if op.rooted else None)
    b = Builder(collective, "random", scratch=data.draw(st.integers(0, 1)))
    places = collective.num_chunks + b.scratch
    rank, chunk = st.integers(0, ranks - 1), st.integers(0, places - 1)
    for _ in range(data.draw(st.integers(0, 8))):
        add = b.reduce if data.draw(st.booleans()) else b.copy
        add(data.draw(rank), data.draw(chunk), data.draw(rank), data.draw(chunk))
        b.round += data.draw(st.integers(0, 1))
    return b.build()


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_random_schedules_get_the_same_verdict_from_both_proofs(data: st.DataObject) -> None:
    schedule = random_schedule(data)
    assert passes(schedule) is is_right(schedule)


@pytest.mark.parametrize("op_name", EVERY)
def test_accepted_schedules_compute_correct_results(op_name: tuple[Op, str]) -> None:
    for ranks in (1, 2, 5):
        run_and_compare(build(*op_name, ranks=ranks, root=ranks // 2))


@pytest.mark.parametrize("most_bytes", [1, 1 << 30])
@pytest.mark.parametrize("most_dense", [0, 1 << 24])
def test_the_proof_may_process_places_and_ranks_in_batches(
    most_bytes: int, most_dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "_MOST_BYTES", most_bytes)
    monkeypatch.setattr(proof, "_BATCH_BYTES", most_bytes)
    monkeypatch.setattr(chunk_moves, "_MOST_DENSE", most_dense)
    for op, name in EVERY:
        proof.prove(build(op, name, ranks=9, root=4))
    for op in ("all_reduce", "scan", "exscan"):
        good = build(op, "recursive_doubling", ranks=130)
        proof.prove(good)
        with pytest.raises(ScheduleError, match=r"lacks the contribution of rank \d+.* at the end"):
            proof.prove(replace(good, transfers=good.transfers[:-1]))
        again = Transfer(round=99, src=129, src_chunk=0, dst=128, dst_chunk=0, reduce=True)
        with pytest.raises(ScheduleError, match=r"rank 128, .* contribution of rank .* twice"):
            proof.prove(replace(good, transfers=[*good.transfers, again]))


def test_a_prefix_with_an_extra_contribution_is_rejected() -> None:
    everything = build("all_reduce", "one_shot", ranks=3)
    scan = replace(everything, collective=Collective(op=Op.SCAN, ranks=3))
    with pytest.raises(
        ScheduleError, match=r"rank 0, chunk 0, round 0 has the unexpected .* 1, 2 at"
    ):
        proof.prove(scan)


def test_a_long_list_of_ranks_is_cut() -> None:
    collective = Collective(op=Op.ALL_REDUCE, ranks=99)
    with pytest.raises(ScheduleError, match=r"rank 1, 2, 3, 4, 5, 6, 7, 8 and 90 more at the end"):
        proof.prove(Schedule(collective=collective, algorithm="none", transfers=()))


def test_too_many_chunks_are_rejected() -> None:
    collective = Collective(op=Op.ALL_GATHER, ranks=1 << 16)
    with pytest.raises(UnsupportedError, match="demands 4294967296 chunks, but"):
        check(Schedule(collective=collective, algorithm="none", transfers=()))


def test_channels_do_not_affect_the_proof() -> None:
    good = build("all_reduce", "ring", ranks=4)
    columns = replace(good.columns, channel=np.arange(len(good.transfers)))
    check(replace(good, transfers=Transfers(columns)))
    negative = replace(good.transfers[3], channel=-1)
    with pytest.raises(ScheduleError, match=r"rank 3, chunk 2, round 0: channel -1 is negative"):
        check(replace(good, transfers=[*good.transfers[:3], negative, *good.transfers[4:]]))


@pytest.mark.parametrize(("name", "ranks"), [("ring", 48), ("direct", 52)])
def test_plans_too_large_for_check_are_correct(name: str, ranks: int) -> None:
    """Tests plans that `check` does not replay, because they are too large. A replay must find no
    error in them.
    """
    schedule = build("all_reduce", name, ranks=ranks)
    assert schedule.columns.count.sum() > REPLAYED_CHUNKS
    check_plans(schedule.collective, lower(schedule), depth=1, blocks=2)


def test_a_ring_of_1024_ranks_is_built_and_proved() -> None:
    schedule = build("all_reduce", "ring", ranks=1024)
    check(schedule)
    assert len(schedule.transfers) == 2 * 1023 * 1024


def test_the_proof_of_1024_ranks_takes_less_than_a_gibibyte() -> None:
    schedule = build("all_reduce", "ring", ranks=1024)
    lost = len(schedule.transfers) - 1
    schedule = replace(schedule, transfers=schedule.transfers[:lost])
    tracemalloc.start()
    try:
        with pytest.raises(ScheduleError, match=r"round 2045 lacks the contribution of rank \d"):
            check(schedule)
        assert tracemalloc.get_traced_memory()[1] < 1 << 30
    finally:
        tracemalloc.stop()

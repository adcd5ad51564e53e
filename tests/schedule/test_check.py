"""The checker rejects schedules that break one rule."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.algorithms import build
from unisono.errors import ScheduleError
from unisono.schedule import Builder, Collective, Schedule, Transfer, check
from unisono.types import Op


def refuse(schedule: Schedule, *, rank: int, chunk: int, round: int, text: str) -> None:
    """Checks that the schedule is rejected, and that the error names this reason, rank, chunk and
    round.
    """
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert f"rank {rank}, chunk {chunk}, round {round}" in str(caught.value)
    assert re.search(text, str(caught.value))


def with_transfers(schedule: Schedule, *transfers: Transfer) -> Schedule:
    return replace(schedule, transfers=transfers)


def changed(schedule: Schedule, index: int, **changes: int) -> Schedule:
    transfers = list(schedule.transfers)
    transfers[index] = replace(transfers[index], **changes)  # type: ignore[arg-type]
    return with_transfers(schedule, *transfers)


def index_of(schedule: Schedule, **fields: int) -> int:
    """Returns the index of the only transfer with these fields."""
    (index,) = (
        i
        for i, t in enumerate(schedule.transfers)
        if all(getattr(t, name) == value for name, value in fields.items())
    )
    return index


def without(schedule: Schedule, **fields: int) -> Schedule:
    gone = index_of(schedule, **fields)
    kept = schedule.transfers[:gone] + schedule.transfers[gone + 1 :]
    return with_transfers(schedule, *kept)


def test_a_missing_copy_is_rejected() -> None:
    schedule = without(build("all_gather", "direct", ranks=3), src=2, dst=1)
    refuse(schedule, rank=1, chunk=2, round=0, text="is empty at the end")


def test_a_missing_reduction_is_rejected() -> None:
    schedule = without(build("reduce", "direct", ranks=4, root=1), src=3)
    refuse(schedule, rank=1, chunk=0, round=0, text="lacks the contribution of rank 3 at")


def test_an_empty_schedule_is_rejected() -> None:
    schedule = with_transfers(build("all_reduce", "ring", ranks=3))
    refuse(
        schedule, rank=0, chunk=0, round=0, text="lacks the contribution of rank 1, 2 at the end"
    )


def test_a_repeated_reduction_in_one_round_is_rejected() -> None:
    schedule = build("all_reduce", "one_shot", ranks=3)
    twice = with_transfers(schedule, *schedule.transfers, schedule.transfers[-1])
    refuse(twice, rank=2, chunk=0, round=0, text="contribution of rank 1 twice")


def test_a_repeated_reduction_in_another_round_is_rejected() -> None:
    schedule = build("reduce_scatter", "pairwise", ranks=3)
    again = replace(schedule.transfers[0], round=2)
    refuse(
        with_transfers(schedule, *schedule.transfers, again),
        rank=1,
        chunk=1,
        round=2,
        text="contribution of rank 0 twice",
    )


def test_swapped_rounds_are_rejected() -> None:
    schedule = build("broadcast", "chain", ranks=3)
    swap = {0: 1, 1: 0}
    transfers = [replace(t, round=swap.get(t.round, t.round)) for t in schedule.transfers]
    swapped = with_transfers(schedule, *sorted(transfers, key=lambda t: t.round))
    refuse(swapped, rank=1, chunk=0, round=0, text="is read while empty")


def test_unordered_rounds_are_rejected() -> None:
    schedule = build("all_gather", "ring", ranks=3)
    mixed = with_transfers(schedule, *schedule.transfers[3:], *schedule.transfers[:3])
    refuse(mixed, rank=0, chunk=0, round=0, text="comes after round 1")


def test_a_negative_round_is_rejected() -> None:
    schedule = changed(build("all_gather", "direct", ranks=2), 0, round=-1)
    refuse(schedule, rank=0, chunk=0, round=-1, text="is negative")


def test_a_copy_instead_of_a_reduction_is_rejected() -> None:
    schedule = changed(build("reduce", "binomial_tree", ranks=2), 0, reduce=False)
    refuse(schedule, rank=0, chunk=0, round=0, text="lacks the contribution of rank 0")


def test_a_reduction_instead_of_a_copy_is_rejected() -> None:
    schedule = changed(build("all_gather", "direct", ranks=3), 0, reduce=True)
    refuse(schedule, rank=1, chunk=0, round=0, text="a reduction's destination while empty")


def test_a_reduction_into_the_result_is_rejected() -> None:
    schedule = build("all_reduce", "direct", ranks=2)
    index = index_of(schedule, round=1, src=1)
    refuse(
        changed(schedule, index, reduce=True),
        rank=0,
        chunk=1,
        round=1,
        text="contribution of rank 0 twice",
    )


@pytest.mark.parametrize(
    ("changes", "rank", "chunk", "text"),
    [
        ({"src": 4}, 4, 0, "rank in 0..3"),
        ({"src": -1}, -1, 0, "rank in 0..3"),
        ({"dst": 4}, 4, 0, "rank in 0..3"),
        ({"src_chunk": 4}, 0, 4, "chunk in 0..3"),
        ({"src_chunk": -1}, 0, -1, "chunk in 0..3"),
        ({"dst_chunk": 4}, 1, 4, "chunk in 0..3"),
        ({"count": 5}, 0, 4, "chunk in 0..3"),
        ({"count": 0}, 0, 0, "got 0"),
        ({"count": -1}, 0, 0, "got -1"),
    ],
)
def test_indices_out_of_range_are_rejected(
    changes: dict[str, int], rank: int, chunk: int, text: str
) -> None:
    schedule = changed(build("all_gather", "direct", ranks=4), 0, **changes)
    refuse(schedule, rank=rank, chunk=chunk, round=0, text=text)


def test_negative_scratch_is_rejected() -> None:
    with pytest.raises(ScheduleError, match="scratch locations, got -1"):
        check(replace(build("barrier", "direct", ranks=2), scratch=-1))


def test_two_copies_into_one_place_are_rejected() -> None:
    schedule = build("broadcast", "binomial_tree", ranks=4)
    again = replace(schedule.transfers[-1], src=0)
    refuse(
        with_transfers(schedule, *schedule.transfers, again),
        rank=3,
        chunk=0,
        round=1,
        text="written by ranks 2, 0 in one round",
    )


def test_a_copy_and_a_reduction_into_one_place_are_rejected() -> None:
    schedule = changed(build("all_reduce", "one_shot", ranks=3), 0, reduce=False)
    refuse(
        schedule, rank=0, chunk=0, round=0, text="written by ranks 1, 2 in one round, but not all"
    )


def test_a_premature_read_is_rejected() -> None:
    schedule = build("broadcast", "binomial_tree", ranks=4)
    early = replace(schedule.transfers[-1], round=0)
    transfers = sorted((*schedule.transfers[:-1], early), key=lambda t: t.round)
    refuse(with_transfers(schedule, *transfers), rank=2, chunk=0, round=0, text="while empty")


def test_the_wrong_root_is_rejected() -> None:
    schedule = build("broadcast", "direct", ranks=3, root=0)
    collective = replace(schedule.collective, root=1)
    refuse(replace(schedule, collective=collective), rank=0, chunk=0, round=0, text="while empty")


def test_the_wrong_root_of_a_reduction_is_rejected() -> None:
    schedule = build("reduce", "direct", ranks=3, root=0)
    collective = replace(schedule.collective, root=2)
    refuse(
        replace(schedule, collective=collective),
        rank=2,
        chunk=0,
        round=0,
        text="lacks the contribution of rank 0, 1",
    )


def test_a_chunk_at_the_wrong_location_is_rejected() -> None:
    schedule = build("scatter", "direct", ranks=3)
    index = index_of(schedule, dst=2)
    refuse(changed(schedule, index, src_chunk=1), rank=2, chunk=2, round=0, text="holds chunk 1")


def test_different_chunks_in_one_sum_are_rejected() -> None:
    schedule = build("reduce_scatter", "direct", ranks=3)
    index = index_of(schedule, src=0, dst=2)
    refuse(
        changed(schedule, index, src_chunk=1),
        rank=2,
        chunk=2,
        round=0,
        text="mixes contributions to chunk 1 and 2",
    )


def test_a_local_read_of_a_place_written_in_the_same_round_is_rejected() -> None:
    b = Builder(Collective(op=Op.ALL_REDUCE, ranks=2), "test", scratch=1)
    b.copy(0, 0, 0, 1)
    b.reduce(1, 0, 0)
    refuse(b.build(), rank=0, chunk=0, round=0, text="read by its own rank and written")


def test_overwriting_a_needed_value_is_rejected_at_the_end() -> None:
    schedule = build("all_reduce", "one_shot", ranks=2)
    b = Builder(schedule.collective, "test", scratch=1)
    b.copy(0, 0, 0, 1)
    b.next_round()
    b.reduce(1, 0, 0)
    b.reduce(0, 0, 1)
    b.next_round()
    check(b.build())
    b.copy(0, 1, 0, 0)
    refuse(b.build(), rank=0, chunk=0, round=2, text="lacks the contribution of rank 1")


def test_overwriting_with_an_equal_value_is_allowed() -> None:
    schedule = build("all_gather", "ring", ranks=3)
    again = replace(schedule.transfers[-1], round=9)
    check(with_transfers(schedule, *schedule.transfers, again))


MINIMAL = (
    ("all_reduce", "direct"),
    ("all_reduce", "one_shot"),
    ("all_reduce", "ring"),
    ("all_reduce", "recursive_doubling"),
    ("reduce_scatter", "pairwise"),
    ("all_gather", "ring"),
    ("all_to_all", "direct"),
    ("broadcast", "chain"),
    ("broadcast", "scatter_all_gather"),
    ("reduce", "binomial_tree"),
    ("gather", "binomial_tree"),
    ("scatter", "binomial_tree"),
)


@given(data=st.data())
@settings(deadline=None)
def test_no_transfer_can_be_omitted(data: st.DataObject) -> None:
    op, name = data.draw(st.sampled_from(MINIMAL))
    ranks = data.draw(st.integers(2, 7))
    schedule = build(op, name, ranks=ranks, root=data.draw(st.integers(0, ranks - 1)))
    gone = data.draw(st.integers(0, len(schedule.transfers) - 1))
    kept = schedule.transfers[:gone] + schedule.transfers[gone + 1 :]
    with pytest.raises(ScheduleError, match=r"rank \d+, chunk \d+, round \d+"):
        check(with_transfers(schedule, *kept))


@given(data=st.data())
@settings(deadline=None)
def test_no_transfer_can_change_its_source(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(3, 6))
    schedule = build("all_reduce", "ring", ranks=ranks)
    # the first half of the rounds, which reduce
    index = data.draw(st.integers(0, ranks * (ranks - 1) - 1))
    old = schedule.transfers[index].src
    src = data.draw(st.integers(0, ranks - 1).filter(lambda r: r != old))
    with pytest.raises(ScheduleError, match=r"rank \d+, chunk \d+, round \d+"):
        check(changed(schedule, index, src=src))

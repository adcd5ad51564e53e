"""The volume of each call equals its traffic matrix and the closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traffic_matrix import sent_and_received, traffic
from unisono.communicator.call_cache import CallRequest
from unisono.communicator.call_volume import (
    COUNTER_ROWS,
    elements_moved,
    internal_volume,
    volume_of,
)
from unisono.types import DType, Op, ReduceOp

ROOTED = (Op.BROADCAST, Op.REDUCE, Op.SCATTER, Op.GATHER)
SHARED = (Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.SCATTER, Op.GATHER)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Op, list[int], int, int]:
    """Draws an operation, its counts of elements (see `elements_moved`), the number of ranks, and
    the root.
    """
    op = draw(st.sampled_from(Op))
    ranks = draw(st.integers(1, 9))
    root = draw(st.integers(0, ranks - 1)) if op in ROOTED else -1
    pieces = 1
    if op is Op.BARRIER:
        pieces = 0
    elif op in SHARED:
        pieces = ranks
    elif op is Op.ALL_TO_ALL:
        pieces = draw(st.sampled_from([ranks, ranks * ranks]))
    counts = draw(st.lists(st.integers(0, 1 << 40), min_size=pieces, max_size=pieces))
    # one count per rank, instead of one count per pair of ranks, requires equal counts
    if op is Op.ALL_TO_ALL and pieces == ranks:
        counts = [counts[0]] * ranks
    return op, counts, ranks, root


@given(calls())
def test_every_rank_moves_what_its_traffic_matrix_says(
    call: tuple[Op, list[int], int, int],
) -> None:
    op, counts, ranks, root = call
    matrix = traffic(op, counts, ranks, root)
    moved = [elements_moved(op, counts, rank=r, ranks=ranks, root=root) for r in range(ranks)]
    assert moved == [sent_and_received(matrix, rank) for rank in range(ranks)]
    assert sum(sent for sent, _ in moved) == sum(received for _, received in moved)


@given(st.integers(0, 1 << 40), st.integers(1, 64))
def test_even_calls_have_the_closed_forms(share: int, ranks: int) -> None:
    n, whole = ranks, share * ranks  # all closed forms have the factor (n-1)/n
    for rank in range(ranks):
        for op, counts, expected in (
            (Op.ALL_REDUCE, [whole], 2 * (n - 1) * whole // n),
            (Op.REDUCE_SCATTER, [share] * n, (n - 1) * whole // n),
            (Op.ALL_GATHER, [share] * n, (n - 1) * whole // n),
            (Op.ALL_TO_ALL, [share] * n, (n - 1) * whole // n),
        ):
            assert elements_moved(op, counts, rank=rank, ranks=n) == (expected, expected)


@given(st.integers(0, 1 << 40), st.integers(1, 64))
def test_an_all_reduce_of_any_length_moves_2_n_minus_1_times_its_length(
    count: int, ranks: int
) -> None:
    moved = [elements_moved(Op.ALL_REDUCE, [count], rank=r, ranks=ranks) for r in range(ranks)]
    assert sum(sent for sent, _ in moved) == 2 * (ranks - 1) * count
    assert max(moved)[0] - min(moved)[0] <= max(ranks - 2, 0)


def test_a_wider_copy_counts_in_the_type_of_the_caller() -> None:
    narrow = CallRequest(Op.ALL_REDUCE, (14,), DType.FLOAT16)
    wide = CallRequest(Op.ALL_REDUCE, (28,), DType.FLOAT32, caller_dtype=DType.FLOAT16)
    for rank in range(3):
        found = volume_of(narrow, rank=rank, ranks=3)
        assert found == volume_of(wide, rank=rank, ranks=3)
        assert found.bytes_sent == 2 * elements_moved(Op.ALL_REDUCE, [7], rank=rank, ranks=3)[0]


def test_packed_arrays_count_one_by_one() -> None:
    lengths = (4, 20, 0, 12)
    packed = CallRequest(Op.ALL_REDUCE, (sum(lengths),), DType.INT32, ReduceOp.MAX, packed=lengths)
    for rank in range(3):
        found = volume_of(packed, rank=rank, ranks=3)
        alone = [
            volume_of(CallRequest(Op.ALL_REDUCE, (each,), DType.INT32), rank=rank, ranks=3)
            for each in lengths
        ]
        assert found.calls == len(lengths)
        assert found.bytes_sent == sum(each.bytes_sent for each in alone)
        assert found.bytes_received == sum(each.bytes_received for each in alone)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_calls_of_the_library_have_a_row_of_their_own(ranks: int) -> None:
    row, calls_made, sent, received = internal_volume(40, ranks=ranks)
    assert (COUNTER_ROWS[row], calls_made) == ("internal", 1)
    assert sent == received == 40 * (ranks - 1)
    assert len(COUNTER_ROWS) == len(set(COUNTER_ROWS)) == len(Op) + 7

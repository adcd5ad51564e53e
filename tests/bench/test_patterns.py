"""Results computed here by NumPy, whole array at a time, against the tiled comparison."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unisono.bench.cases import OPERATIONS, STORAGE, Case, reductions_of
from unisono.bench.patterns import TILE_COUNT, allocate, count_wrong

RANKS = 3
NUMPY_FOLDS = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def inputs(case: Case) -> list[Any]:
    """Every rank's x, as the benchmark fills it."""
    filled = []
    for rank in range(case.ranks):
        x, out = allocate(case)
        seen = []
        count_wrong(case, rank, x, out, lambda x=x, seen=seen: seen.append(x.copy()))
        filled.append(seen[0])
    return filled


def result(case: Case, rank: int, xs: list[Any]) -> Any:
    """What the operation must leave on this rank."""
    piece, start = case.piece_count, rank * case.piece_count
    if case.operation.reduces:
        total = xs[0].copy()
        for x in {"scan": xs[1 : rank + 1], "exscan": xs[1:rank]}.get(case.op, xs[1:]):
            fold = NUMPY_FOLDS["sum" if case.redop == "avg" else case.redop]
            total = fold(total, x)
        if case.redop == "avg":
            total = (total / case.ranks).astype(total.dtype)
        return total[start : start + piece] if case.op == "reduce_scatter" else total
    match case.op:
        case "all_gather" | "gather":
            return np.concatenate(xs)
        case "all_to_all":
            return np.concatenate([x[start : start + piece] for x in xs])
        case "scatter":
            return xs[case.root][start : start + piece]
        case "broadcast":
            return xs[case.root]
        case "send_recv":
            return xs[(rank - 1) % case.ranks]
    raise AssertionError(case.op)


def performed(case: Case, rank: int, spoil: int | None = None, shift: int = 0) -> int:
    """Wrong elements that are found when the operation is done right, spoilt or shifted."""
    xs = inputs(case)
    x, out = allocate(case)
    target = x if case.operation.in_place else out

    def call() -> None:
        target[:] = np.roll(result(case, rank, xs), shift)
        if spoil is not None:
            target[spoil] = target[spoil] == 0

    return count_wrong(case, rank, x, out, call)


COPIES = [op for op in OPERATIONS if not OPERATIONS[op].reduces and op != "barrier"]
REDUCTIONS = [op for op in OPERATIONS if OPERATIONS[op].reduces]


@pytest.mark.parametrize("op", COPIES)
@pytest.mark.parametrize("dtype", STORAGE)
def test_right_copies_pass(op: str, dtype: str) -> None:
    case = Case(op=op, ranks=RANKS, nbytes=999, dtype=dtype, root=1)
    assert performed(case, rank=1) == 0


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", [name for name in STORAGE if name != "bfloat16"])
def test_right_reductions_pass(op: str, dtype: str) -> None:
    for redop in reductions_of(dtype, op):
        case = Case(op=op, ranks=RANKS, nbytes=999, dtype=dtype, redop=redop, root=1)
        assert [performed(case, rank) for rank in (1, 2)] == [0, 0]


@pytest.mark.parametrize("op", [*COPIES, *REDUCTIONS])
@pytest.mark.parametrize("spoil", [0, 77, -1])
def test_a_single_wrong_element_is_found(op: str, spoil: int) -> None:
    case = Case(op=op, ranks=RANKS, nbytes=3 * 4 * TILE_COUNT + 600)
    assert performed(case, rank=0, spoil=spoil) == 1


@pytest.mark.parametrize("op", [*COPIES, *REDUCTIONS])
@pytest.mark.parametrize("shift", [1, 16, 1024, 16_384])
def test_misplaced_data_is_found(op: str, shift: int) -> None:
    case = Case(op=op, ranks=RANKS, nbytes=3 * 4 * TILE_COUNT + 600)
    assert performed(case, rank=0, shift=shift) > case.piece_count // 2


def test_a_result_that_was_never_written_is_found() -> None:
    case = Case(op="all_gather", ranks=RANKS, nbytes=1200)
    x, out = allocate(case)
    assert count_wrong(case, 0, x, out, lambda: None) == case.count


def test_ranks_that_owe_nothing_are_not_judged() -> None:
    case = Case(op="reduce", ranks=RANKS, nbytes=1200, root=2)
    x, out = allocate(case)
    assert count_wrong(case, 0, x, out, lambda: None) == 0


def test_bfloat16_is_stored_as_its_upper_half() -> None:
    case = Case(op="all_reduce", ranks=RANKS, nbytes=1200, dtype="bfloat16")
    xs = inputs(case)
    x, out = allocate(case)

    def call() -> None:
        total = sum((bits.astype(np.uint32) << 16).view(np.float32) for bits in xs)
        x[:] = total.view(np.uint32) >> 16

    assert count_wrong(case, 0, x, out, call) == 0

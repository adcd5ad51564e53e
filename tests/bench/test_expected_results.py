"""Tests of the check that compares results tile by tile (a tile is a block of elements). NumPy
computes the expected results from whole arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from unisono.bench.cases import BIT_PATTERNS, OPERATIONS, PAIRS, STORAGE, Case, reductions_of
from unisono.bench.expected_results import TILE_COUNT, allocate, count_wrong

RANKS = 3
NUMPY_FOLDS = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
}


def inputs(case: Case) -> list[Any]:
    """Returns all ranks' input arrays, as the benchmark fills them."""
    filled = []
    for rank in range(case.ranks):
        x, out = allocate(case, rank)
        seen = []
        count_wrong(case, rank, x, out, lambda x=x, seen=seen: seen.append(x.copy()))
        filled.append(seen[0])
    return filled


def result(case: Case, rank: int, xs: list[Any]) -> Any:
    """Returns the result that the operation must have on `rank`."""
    if case.operation.reduces:
        xs = {"scan": xs[: rank + 1], "exscan": xs[: max(1, rank)]}.get(case.op, xs)
        total = best(case, xs) if case.dtype in PAIRS else xs[0].copy()
        for x in xs[1:] if case.dtype not in PAIRS else []:
            fold = NUMPY_FOLDS["sum" if case.redop == "avg" else case.redop]
            total = fold(total, x)
        if case.redop == "avg":
            total = (total / case.ranks).astype(total.dtype)
        return cut(total, case.shares)[rank] if case.operation.x_split else total
    match case.op.removesuffix("_v"):
        case "all_gather" | "gather":
            return np.concatenate(xs)
        case "all_to_all":
            return np.concatenate([cut(x, case.lengths(r))[rank] for r, x in enumerate(xs)])
        case "scatter":
            return cut(xs[case.root], case.shares)[rank]
        case "broadcast":
            return xs[case.root]
        case "send_recv" | "put":
            return xs[(rank - 1) % case.ranks]
    raise AssertionError(case.op)


def cut(x: Any, lengths: Sequence[int]) -> list[Any]:
    return np.split(x, np.cumsum(lengths)[:-1])


def best(case: Case, xs: list[Any]) -> Any:
    """Returns for each element the (value, index) pair with the smallest value (minloc) or the
    largest value (maxloc). Among equal values, returns the pair with the lowest index.
    """
    best_first = 1 if case.redop == "minloc" else -1
    columns = zip(*(x.tolist() for x in xs), strict=True)
    found = [min(pairs, key=lambda p: (best_first * p[0], p[1])) for pairs in columns]
    return np.array(found, case.storage)


def performed(case: Case, rank: int, spoil: int | None = None, shift: int = 0) -> int:
    """Returns the number of wrong elements that the check finds after an operation. `spoil` is the
    index of an element to change; the result is rotated by `shift` elements.
    """
    xs = inputs(case)
    x, out = allocate(case, rank)
    target = x if case.operation.in_place else out

    def call() -> None:
        target[:] = np.roll(result(case, rank, xs), shift)
        if spoil is not None:
            target[spoil] = target[spoil] == 0

    return count_wrong(case, rank, x, out, call)


COPIES = [
    name for name, op in OPERATIONS.items() if not (op.reduces or op.paired or name == "barrier")
]
REDUCTIONS = [op for op in OPERATIONS if OPERATIONS[op].reduces]


@pytest.mark.parametrize("op", COPIES)
@pytest.mark.parametrize("dtype", STORAGE)
def test_right_copies_pass(op: str, dtype: str) -> None:
    case = Case(op=op, ranks=RANKS, nbytes=999, dtype=dtype, root=1)
    assert [performed(case, rank) for rank in range(RANKS)] == [0, 0, 0]


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", [name for name in STORAGE if name not in BIT_PATTERNS])
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
    assert performed(case, rank=0, shift=shift) > case.shares[0] // 2


def test_a_result_that_was_never_written_is_found() -> None:
    case = Case(op="all_gather", ranks=RANKS, nbytes=1200)
    x, out = allocate(case, 0)
    assert count_wrong(case, 0, x, out, lambda: None) == case.count


def test_ranks_without_a_result_are_not_verified() -> None:
    case = Case(op="reduce", ranks=RANKS, nbytes=1200, root=2)
    x, out = allocate(case, 0)
    assert count_wrong(case, 0, x, out, lambda: None) == 0


@pytest.mark.parametrize("ranks", [3, 13])
@pytest.mark.parametrize("dtype", BIT_PATTERNS)
def test_narrow_floats_are_exact_on_any_number_of_ranks(dtype: str, ranks: int) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    for redop in reductions_of(dtype, "all_reduce"):
        case = Case(op="all_reduce", ranks=ranks, nbytes=1200, dtype=dtype, redop=redop)
        values = torch.stack([torch.from_numpy(x).view(kind).float() for x in inputs(case)])
        fold = {"avg": "sum", "min": "amin", "max": "amax"}.get(redop, redop)
        total = getattr(values, fold)(0) / (ranks if redop == "avg" else 1)
        narrow = total.to(kind)
        assert narrow.float().equal(total)
        x, out = allocate(case, 0)
        bits = narrow.view(getattr(torch, BIT_PATTERNS[dtype])).numpy()
        assert count_wrong(case, 0, x, out, lambda x=x, bits=bits: x.__setitem__(..., bits)) == 0


@pytest.mark.parametrize("redop", ["sum", "avg", "prod", "land", "lor", "lxor"])
def test_the_data_of_every_rank_counts(redop: str) -> None:
    case = Case(op="all_reduce", ranks=RANKS, nbytes=4000, dtype="int32", redop=redop)
    for omitted in range(RANKS):
        xs = inputs(case)
        x, out = allocate(case, 0)
        total = result(case, 0, [x for rank, x in enumerate(xs) if rank != omitted])
        assert count_wrong(case, 0, x, out, lambda x=x, t=total: x.__setitem__(..., t)) > 0


def test_bfloat16_is_stored_as_its_upper_half() -> None:
    case = Case(op="all_reduce", ranks=RANKS, nbytes=1200, dtype="bfloat16")
    xs = inputs(case)
    x, out = allocate(case, 0)

    def call() -> None:
        total = sum((bits.astype(np.uint32) << 16).view(np.float32) for bits in xs)
        x[:] = total.view(np.uint32) >> 16

    assert count_wrong(case, 0, x, out, call) == 0

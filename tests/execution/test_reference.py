"""The reference executor matches NumPy, for all algorithms, sizes and block sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cases_in_turn import turn
from unisono.algorithms import build, names
from unisono.errors import ScheduleError, UnsupportedError
from unisono.execution.fold import PAIRS
from unisono.execution.narrow_floats import narrowed
from unisono.execution.reference import num_blocks, part_bytes, run
from unisono.schedule import Builder, Code, Collective, ExecutionPlan, Schedule, check, lower
from unisono.types import DType, Op, ReduceOp

Array = NDArray[Any]
Kind = tuple[DType, ReduceOp]

INT_SUM = (DType.INT32, ReduceOp.SUM)

EVERY = [(op, name) for op in Op for name in names(op)]
KINDS: dict[DType, type[np.generic]] = {
    DType.FLOAT32: np.float32,
    DType.FLOAT64: np.float64,
    DType.INT8: np.int8,
    DType.UINT8: np.uint8,
    DType.INT16: np.int16,
    DType.UINT16: np.uint16,
    DType.INT32: np.int32,
    DType.UINT32: np.uint32,
    DType.INT64: np.int64,
    DType.UINT64: np.uint64,
    DType.BOOL: np.uint8,
    DType.COMPLEX64: np.complex64,
    DType.COMPLEX128: np.complex128,
}


def encode(values: Array, dtype: DType) -> NDArray[np.uint8]:
    """Returns the bytes of small integers in a type; every type holds these integers exactly."""
    if dtype.is_pair:
        kinds = zip(("value", "index"), PAIRS[dtype], strict=True)
        result = np.empty(values.shape, [(name, kind) for name, kind in kinds])
        result["value"], result["index"] = values, values * 3 % 4
        return result.view(np.uint8)
    if dtype.is_narrow_float:
        return narrowed(values.astype(np.float32), dtype).view(np.uint8)
    return values.astype(KINDS[dtype]).view(np.uint8)


def expected_reduction(rows: Array, dtype: DType, op: ReduceOp) -> NDArray[np.uint8]:
    """Returns the bytes of the expected reduction of small integers."""
    if dtype is DType.BOOL:
        any_of, all_of = np.any(rows, axis=0), np.all(rows, axis=0)
        odd = np.sum(rows, axis=0) % 2
        if op in (ReduceOp.BXOR, ReduceOp.LXOR):
            return encode(odd, dtype)
        is_and = op in (ReduceOp.PROD, ReduceOp.MIN, ReduceOp.BAND, ReduceOp.LAND)
        return encode(np.asarray(all_of if is_and else any_of), dtype)
    if op is ReduceOp.AVG:
        total = rows.sum(axis=0)
        if dtype.is_float or dtype.is_complex:
            wide = np.float64 if dtype in (DType.FLOAT64, DType.COMPLEX128) else np.float32
            return encode(total.astype(wide) / wide(len(rows)), dtype)
        return encode(total // len(rows), dtype)
    combine = {
        ReduceOp.SUM: np.add,
        ReduceOp.PROD: np.multiply,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
        ReduceOp.BAND: np.bitwise_and,
        ReduceOp.BOR: np.bitwise_or,
        ReduceOp.BXOR: np.bitwise_xor,
        ReduceOp.LAND: np.logical_and,
        ReduceOp.LOR: np.logical_or,
        ReduceOp.LXOR: np.logical_xor,
        ReduceOp.PREMUL_SUM: np.add,
        ReduceOp.MINLOC: np.minimum,
        ReduceOp.MAXLOC: np.maximum,
    }[op]
    return encode(combine.reduce(rows, axis=0), dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Inputs, empty outputs and expected outputs. An expected output is None if it is undefined."""

    inputs: list[list[NDArray[np.uint8]]]
    outputs: list[list[NDArray[np.uint8]]]
    expected: list[list[NDArray[np.uint8] | None]]


def problem(
    collective: Collective, kind: Kind, counts: list[int], seed: int = 1, *, in_place: bool = False
) -> Problem:
    """Returns a problem in which vectors are divided into pieces, one for each source or
    destination. Piece i has counts[i] elements.
    """
    dtype, reduce_op = kind
    n, op = collective.ranks, collective.op
    rng = np.random.default_rng(seed)
    # Products are powers of two, because every type holds these exactly.
    top = 2 if reduce_op is ReduceOp.PROD else 3
    if dtype is DType.BOOL or (dtype.is_float8 and reduce_op is not ReduceOp.PROD):
        top = 1
    elif reduce_op.is_logical and (n == 1 or op.scans):
        # with a single rank, the communicator normalises the logical values, not the executor
        top = 1

    def numbers(count: int) -> Array:
        low = 1 if reduce_op is ReduceOp.PROD and dtype is not DType.BOOL else 0
        return rng.integers(low, top, size=count, endpoint=True)

    def count_of(rank: int, piece: int, *, out: bool) -> int:
        many = collective.output_pieces(rank) if out else collective.input_pieces(rank)
        if op in (Op.ALL_GATHER, Op.GATHER):
            return counts[piece] if out else counts[rank]
        if op in (Op.REDUCE_SCATTER, Op.SCATTER):
            return counts[rank] if out else counts[piece]
        if op is Op.ALL_TO_ALL and len(set(counts)) > 1:
            return counts[(piece + 2 * rank) % n] if not out else counts[(rank + 2 * piece) % n]
        return counts[0] if many else 0

    values = [
        [numbers(count_of(r, i, out=False)) for i in range(collective.input_pieces(r))]
        for r in range(n)
    ]
    inputs = [[encode(v, dtype) for v in pieces] for pieces in values]
    outputs = [
        [
            np.full(count_of(r, i, out=True) * dtype.size_bytes, 0xEE, np.uint8)
            for i in range(collective.output_pieces(r))
        ]
        for r in range(n)
    ]
    expected: list[list[NDArray[np.uint8] | None]] = []
    for rank in range(n):
        pieces: list[NDArray[np.uint8] | None] = []
        for piece in range(collective.output_pieces(rank)):
            sources = _sources(collective, rank, piece)
            if collective.op.reduces and sources:
                rows = np.stack([values[r][i] for r, i in sources])
                pieces.append(expected_reduction(rows, dtype, reduce_op))
            else:
                pieces += [inputs[r][i].copy() for r, i in sources] or [None]
        expected.append(pieces)
    if in_place:
        _alias(collective, inputs, outputs)
    return Problem(inputs=inputs, outputs=outputs, expected=expected)


def _sources(collective: Collective, rank: int, piece: int) -> list[tuple[int, int]]:
    """Returns the inputs whose combination is the output piece `piece` of `rank`, as (rank, piece)
    pairs. The list is empty if this output is undefined.
    """
    op, root = collective.op, collective.root
    if op is Op.REDUCE and rank != root:
        return []
    if op.reduces:
        return [(r, rank if op is Op.REDUCE_SCATTER else 0) for r in collective.summands(rank)]
    if op in (Op.BROADCAST, Op.SCATTER):
        assert root is not None
        return [(root, 0 if op is Op.BROADCAST else rank)]
    return [(piece, rank if op is Op.ALL_TO_ALL else 0)]


def _alias(
    collective: Collective,
    inputs: list[list[NDArray[np.uint8]]],
    outputs: list[list[NDArray[np.uint8]]],
) -> None:
    for rank in range(collective.ranks):
        for piece, x in enumerate(inputs[rank]):
            out = collective.in_place_output(rank, piece)
            if out is not None:
                outputs[rank][out][:] = x
                inputs[rank][piece] = outputs[rank][out]


def solve(
    plans: tuple[ExecutionPlan, ...], p: Problem, kind: Kind, *, block: int = 64, depth: int = 2
) -> None:
    originals = [[x.copy() for x in pieces] for pieces in p.inputs]
    run(plans, p.inputs, p.outputs, *kind, block_bytes=block, depth=depth)
    for rank, pieces in enumerate(p.expected):
        for i, want in enumerate(pieces):
            if want is not None:
                assert p.outputs[rank][i].tobytes() == want.tobytes(), f"rank {rank}, piece {i}"
    for rank, inputs in enumerate(p.inputs):
        for x, original in zip(inputs, originals[rank], strict=True):
            if not any(np.shares_memory(x, out) for out in p.outputs[rank]):
                assert x.tobytes() == original.tobytes(), f"rank {rank}: the input was changed"


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_every_algorithm_matches_numpy_at_every_length(op: Op, name: str) -> None:
    for ranks in (1, 2, 3, 4, 7, 13):
        schedule = build(op, name, ranks=ranks, root=ranks // 2)
        plans = lower(schedule)
        for count in (0, 1, 7, 1000):
            with turn(ranks=ranks, count=count):
                p = problem(schedule.collective, INT_SUM, [count] * ranks)
                solve(plans, p, INT_SUM, block=1024 if ranks < 10 else 4096)


@pytest.mark.parametrize("name", names(Op.ALL_REDUCE))
def test_every_type_and_reduction_matches_numpy(name: str) -> None:
    """Tests `one_shot` (a flat sum) and `ring` (a nested sum) with all types and reductions. Tests
    the other algorithms with all reductions of int32 and with sums and averages of all types.
    """
    schedule = build(Op.ALL_REDUCE, name, ranks=5)
    plans = lower(schedule)
    for dtype, reduce_op in product(DType, ReduceOp):
        flat_or_nested = name in ("one_shot", "ring")
        depends = dtype is DType.INT32 or reduce_op in (ReduceOp.SUM, ReduceOp.AVG)
        if not (flat_or_nested or depends):
            continue
        kind = dtype, reduce_op
        with turn(dtype=dtype.name, reduce_op=reduce_op.name):
            p = problem(schedule.collective, kind, [77] * 5)
            if dtype.supports(reduce_op):
                solve(plans, p, kind)
                continue
            with pytest.raises(UnsupportedError, match=f"{dtype.name} .* {reduce_op.name}"):
                solve(plans, p, kind)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_random_problems_match_numpy(data: st.DataObject) -> None:
    op, name = data.draw(st.sampled_from(EVERY))
    ranks = data.draw(st.integers(1, 9))
    schedule = build(op, name, ranks=ranks, root=data.draw(st.integers(0, ranks - 1)))
    plans = lower(schedule)
    dtype = data.draw(st.sampled_from(DType))
    reductions = [r for r in ReduceOp if dtype.supports(r) and not (op.scans and r is ReduceOp.AVG)]
    reduce_op = data.draw(st.sampled_from(reductions))
    in_place = all(plan.in_place for plan in plans) and data.draw(st.booleans())
    length = st.integers(0, 300)
    if any(plan.uniform for plan in plans) or (in_place and op is Op.ALL_TO_ALL):
        counts = [data.draw(length)] * ranks
    else:
        counts = data.draw(st.lists(length, min_size=ranks, max_size=ranks))
    kind = dtype, reduce_op
    p = problem(schedule.collective, kind, counts, data.draw(length), in_place=in_place)
    block = data.draw(st.sampled_from([16, 64, 256, 4096]))
    solve(plans, p, kind, block=block, depth=data.draw(st.integers(1, 3)))


def random_all_reduce(data: st.DataObject, ranks: int) -> Schedule:
    """Draws a schedule that adds and copies contributions in random order. At the end, one rank
    adds the contributions that it lacks, and sends the sum to all ranks.
    """
    parts = data.draw(st.integers(1, 3))
    collective = Collective(op=Op.ALL_REDUCE, ranks=ranks, parts=parts)
    b = Builder(collective, "random", scratch=parts)
    for rank in range(ranks):
        b.copy(rank, 0, rank, parts, count=parts)  # copies of the contributions, for later use
    b.next_round()
    pairs = st.tuples(st.integers(0, ranks - 1), st.integers(0, ranks - 1))
    for part in range(parts):
        holds = [1 << rank for rank in range(ranks)]
        for src, dst in data.draw(st.lists(pairs, max_size=12)):
            if src != dst and not holds[src] & holds[dst]:
                b.reduce(src, part, dst)
                holds[dst] |= holds[src]
            elif src != dst and holds[src] != holds[dst]:
                b.copy(src, part, dst)
                holds[dst] = holds[src]
            b.next_round()
        best = max(range(ranks), key=lambda r: holds[r].bit_count())
        for rank in range(ranks):
            if not holds[best] >> rank & 1:
                b.reduce(rank, parts + part, best, part)
        b.next_round()
        for rank in range(ranks):
            if rank != best:
                b.copy(best, part, rank)
        # the next part of the array begins one round later, so the parts overlap in time
        b.round = part + 1
    return b.build()


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_random_schedules_match_numpy(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 6))
    schedule = random_all_reduce(data, ranks)
    check(schedule)
    in_place = data.draw(st.booleans())
    p = problem(schedule.collective, INT_SUM, [50] * ranks, in_place=in_place)
    plans = lower(schedule)
    assert all(plan.in_place for plan in plans)
    solve(plans, p, INT_SUM, depth=data.draw(st.integers(1, 3)))


def test_algorithms_that_fold_in_rank_order_agree_bit_for_bit() -> None:
    x = np.random.default_rng(3).normal(size=(5, 301)).astype(np.float32)
    expected = x[0].copy()
    for row in x[1:]:
        expected = expected + row
    for name in ("one_shot", "direct"):
        data = x.copy()
        pieces = [[row.view(np.uint8)] for row in data]
        plans = lower(build("all_reduce", name, ranks=5))
        run(plans, pieces, pieces, DType.FLOAT32, ReduceOp.SUM, block_bytes=128)
        assert all(row.tobytes() == expected.tobytes() for row in data)


@pytest.mark.parametrize("name", names(Op.ALL_REDUCE))
@pytest.mark.parametrize("ranks", [2, 3, 6, 8])
def test_all_ranks_get_the_same_bits(name: str, ranks: int) -> None:
    x = np.random.default_rng(4).normal(size=(ranks, 99)).astype(np.float32)
    pieces = [[row.view(np.uint8)] for row in x]
    plans = lower(build("all_reduce", name, ranks=ranks))
    run(plans, pieces, pieces, DType.FLOAT32, ReduceOp.SUM, block_bytes=64)
    assert len({row.tobytes() for row in x}) == 1


def test_a_flat_half_precision_sum_rounds_once() -> None:
    x = np.array([[2048], [1], [1]], np.float16)
    results = {}
    for name in names(Op.ALL_REDUCE):
        data = x.copy()
        pieces = [[row.view(np.uint8)] for row in data]
        plans = lower(build("all_reduce", name, ranks=3))
        run(plans, pieces, pieces, DType.FLOAT16, ReduceOp.SUM, block_bytes=64)
        results[plans[0].reduce_depth] = float(data[0, 0])
    assert results[1] == 2050


def test_parts_begin_at_cache_lines() -> None:
    assert part_bytes(4000, 3, DType.FLOAT32) == 1344
    assert part_bytes(0, 3, DType.FLOAT32) == 0
    assert part_bytes(4, 8, DType.FLOAT32) == 64
    assert part_bytes(100, 1, DType.UINT8) == 128
    assert part_bytes(160, 2, DType.COMPLEX128) == 128


def test_the_longest_part_of_any_rank_decides_the_blocks() -> None:
    plans = lower(build("all_gather", "direct", ranks=2))
    short, long = np.zeros(4, np.uint8), np.zeros(1000, np.uint8)
    inputs, outputs = [[short], [long]], [[short, long]] * 2
    assert num_blocks(plans, inputs, outputs, DType.UINT8, 64) == 16
    barrier = lower(build("barrier", "direct", ranks=2))
    assert num_blocks(barrier, [[], []], [[], []], DType.UINT8, 64) == 1


def test_a_plan_that_waits_for_ever_is_a_deadlock() -> None:
    plans = list(lower(build("all_gather", "direct", ranks=2)))
    records = [replace(r, value=7) if r.code is Code.WAIT else r for r in plans[1].records]
    plans[1] = replace(plans[1], records=tuple(records))
    x = [[np.zeros(4, np.uint8)] for _ in range(2)]
    out = [[np.zeros(4, np.uint8) for _ in range(2)] for _ in range(2)]
    with pytest.raises(ScheduleError, match="deadlock: rank 1, record 2, block 0"):
        run(plans, x, out, DType.UINT8, ReduceOp.SUM, block_bytes=64)


def test_pieces_of_wrong_lengths_are_refused() -> None:
    plans = lower(build("all_reduce", "one_shot", ranks=2))
    x = [[np.zeros(4, np.uint8)] for _ in range(2)]
    out = [[np.zeros(8, np.uint8)] for _ in range(2)]
    with pytest.raises(ScheduleError, match="rank 0, block 0: OUT piece 0 has 8 bytes where 4"):
        run(plans, x, out, DType.UINT8, ReduceOp.SUM, block_bytes=64)


def test_relays_need_pieces_of_equal_length() -> None:
    schedule = build("gather", "binomial_tree", ranks=4)
    p = problem(schedule.collective, INT_SUM, [1, 2, 3, 4])
    with pytest.raises(UnsupportedError, match="equal length"):
        solve(lower(schedule), p, INT_SUM)


@pytest.mark.parametrize(
    ("block", "depth", "text"), [(0, 2, "blocks"), (6, 2, "blocks of 6"), (64, 0, "0 blocks")]
)
def test_invalid_arguments_are_refused(block: int, depth: int, text: str) -> None:
    x = [[np.zeros(4, np.uint8)]]
    plans = lower(build("all_reduce", "one_shot", ranks=1))
    with pytest.raises(UnsupportedError, match=text):
        run(plans, x, x, DType.FLOAT32, ReduceOp.SUM, block_bytes=block, depth=depth)

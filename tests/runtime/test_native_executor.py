"""The native executor does what the reference executor does, bit for bit, whatever the plan."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from unisono import algorithms, config, native
from unisono.errors import UnisonoError, UnsupportedError
from unisono.runtime import reference
from unisono.runtime.fold import PAIRS
from unisono.runtime.narrow import narrowed
from unisono.runtime.native_executor import (
    Arguments,
    LoadedPlan,
    NativeExecutor,
    block_bytes_for,
    piece_counts,
)
from unisono.schedule import Collective, lower
from unisono.types import DType, Op, ReduceOp

Bytes: TypeAlias = NDArray[np.uint8]
Pieces: TypeAlias = list[list[Bytes]]

EVERY = [(op, name) for op in Op for name in algorithms.names(op)]
RANKS = [*range(1, 10), 13, 16]
TIMEOUT_S = 20.0


class Crew:
    """Native executors of all ranks of a group, each driven by a thread of its own."""

    def __init__(self, ranks: int, staging_bytes: int) -> None:
        nonce = secrets.token_bytes(16)
        cores = native.usable_cores()
        fd = native.create_segment(ranks, cores, staging_bytes, nonce)
        fds = [fd, *(os.dup(fd) for _ in range(ranks - 1))]
        self.ranks = ranks
        self.groups = [native.Group(fds[rank], rank, nonce, cores) for rank in range(ranks)]
        self.executors = [
            NativeExecutor(group, rank, stores=config.settings({}).stores)
            for rank, group in enumerate(self.groups)
        ]
        self.pool = concurrent.futures.ThreadPoolExecutor(ranks)

    def plans(self, op: Op, name: str, root: int, block_bytes: int | None) -> list[LoadedPlan]:
        loaded = [executor.plan(op, name, root) for executor in self.executors]
        if block_bytes is None:
            return loaded
        return [dataclasses.replace(plan, block_bytes=block_bytes) for plan in loaded]

    def run(
        self, plans: list[LoadedPlan], args: Arguments, inputs: Pieces, outputs: Pieces
    ) -> None:
        def rank(r: int) -> None:
            call = self.executors[r].prepare(plans[r], args)
            try:
                self.groups[r].run_pieces(call, _memory(inputs[r]), _memory(outputs[r]), TIMEOUT_S)
            except UnisonoError as error:
                self.groups[r].abort(str(error))
                raise

        for future in [self.pool.submit(rank, r) for r in range(self.ranks)]:
            future.result(2 * TIMEOUT_S)

    def close(self) -> None:
        for group in self.groups:
            group.close()
        self.pool.shutdown()


def _memory(pieces: list[Bytes]) -> list[tuple[int, int]]:
    return [(piece.ctypes.data, piece.nbytes) for piece in pieces]


@pytest.fixture(scope="module")
def crews() -> Iterator[Callable[[int, int], Crew]]:
    made: dict[tuple[int, int], Crew] = {}

    def crew(ranks: int, staging_bytes: int) -> Crew:
        key = (ranks, staging_bytes)
        if key not in made:
            made[key] = Crew(ranks, staging_bytes)
        return made[key]

    yield crew
    for each in made.values():
        each.close()


def counts_of(collective: Collective, counts: list[int], rank: int, *, out: bool) -> list[int]:
    """Elements of each piece of a rank, when piece i of the whole has counts[i]."""
    op, n = collective.op, collective.ranks
    pieces_in, pieces_out = piece_counts(op, n, rank, collective.root or 0)
    pieces = pieces_out if out else pieces_in
    if op is Op.ALL_TO_ALL:
        pairs = [(peer, rank) if out else (rank, peer) for peer in range(n)]
        return [counts[(2 * src + dst) % n] for src, dst in pairs]
    by_piece = (op in (Op.ALL_GATHER, Op.GATHER) and out) or (
        op in (Op.REDUCE_SCATTER, Op.SCATTER) and not out
    )
    if by_piece and pieces == n:
        return counts
    if op in (Op.ALL_GATHER, Op.GATHER, Op.REDUCE_SCATTER, Op.SCATTER):
        return [counts[rank]]
    return [counts[0]] * pieces


def random_bytes(rng: np.random.Generator, count: int, dtype: DType) -> Bytes:
    """Any bits of integers; of floats any that are ordinary numbers, so that NaNs stay rare."""
    nbytes = count * dtype.size_bytes
    if dtype is DType.BOOL:
        return rng.integers(0, 2, nbytes, np.uint8)
    if dtype.is_pair:
        return random_pairs(rng, count, dtype)
    if not (dtype.is_float or dtype.is_complex):
        return rng.integers(0, 256, nbytes, np.uint8)
    values = rng.normal(size=count * (2 if dtype.is_complex else 1))
    if dtype.is_narrow_float:
        return narrowed(values.astype(np.float32), dtype).view(np.uint8)
    half = dtype in (DType.FLOAT32, DType.COMPLEX64)
    return values.astype(np.float32 if half else np.float64).view(np.uint8)


def random_pairs(rng: np.random.Generator, count: int, dtype: DType) -> Bytes:
    """Few values and few indices, so that many tie; some NaNs."""
    value, index = PAIRS[dtype]
    result = np.empty(count, [("value", value), ("index", index)])
    result["value"] = rng.integers(-2, 2, count)
    if value in (np.float32, np.float64):
        result["value"][rng.random(count) < 0.1] = np.nan
    result["index"] = rng.integers(-3, 3, count)
    return result.view(np.uint8)


def unaligned(data: Bytes, offset: int) -> Bytes:
    """The same bytes, `offset` bytes behind a cache line."""
    room = np.zeros(data.size + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    view = room[start : start + data.size]
    view[:] = data
    return view


def buffers(
    collective: Collective, counts: list[int], dtype: DType, seed: int, offset: int
) -> tuple[Pieces, Pieces]:
    rng = np.random.default_rng(seed)
    inputs, outputs = [], []
    for rank in range(collective.ranks):
        wanted = counts_of(collective, counts, rank, out=False)
        if collective.op is Op.SCATTER and rank != collective.root:
            inputs.append([unaligned(random_bytes(rng, counts[rank], dtype), offset)])
        else:
            inputs.append([unaligned(random_bytes(rng, count, dtype), offset) for count in wanted])
        sizes = counts_of(collective, counts, rank, out=True)
        blanks = [np.full(count * dtype.size_bytes, 0xEE, np.uint8) for count in sizes]
        outputs.append([unaligned(blank, offset) for blank in blanks])
    return inputs, outputs


def alias(collective: Collective, inputs: Pieces, outputs: Pieces) -> None:
    """Makes the outputs the memory of the inputs where an in-place call has it so."""
    for rank in range(collective.ranks):
        for piece, x in enumerate(inputs[rank]):
            if collective.op is Op.SCATTER and rank != collective.root:
                continue
            out = collective.in_place_output(rank, piece)
            if out is not None and out < len(outputs[rank]):
                outputs[rank][out] = x


def copies(pieces: Pieces) -> Pieces:
    return [[piece.copy() for piece in rank] for rank in pieces]


def compare(
    crew: Crew,
    op: Op,
    name: str,
    counts: list[int],
    *,
    root: int = 0,
    dtype: DType = DType.FLOAT32,
    reduction: ReduceOp = ReduceOp.SUM,
    block_bytes: int | None = None,
    in_place: bool = False,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """Runs both executors on the same bytes."""
    schedule = algorithms.build(op, name, ranks=crew.ranks, root=root)
    collective = schedule.collective
    inputs, outputs = buffers(collective, counts, dtype, seed, offset)
    if in_place:
        alias(collective, inputs, outputs)
    originals = copies(inputs)
    expected = copies(outputs)
    theirs = copies(inputs)
    if in_place:
        alias(collective, theirs, expected)
    block = block_bytes or crew.plans(op, name, root, None)[0].block_bytes
    # The reference has no pieces where a plan has no use for them.
    reference.run(
        lower(schedule),
        [pieces[: collective.input_pieces(rank)] for rank, pieces in enumerate(theirs)],
        [pieces[: collective.output_pieces(rank)] for rank, pieces in enumerate(expected)],
        dtype,
        reduction,
        block_bytes=block,
    )
    lengths = tuple(count * dtype.size_bytes for count in counts)
    args = Arguments(
        op=op, dtype=dtype, reduction=reduction, root=root if op.rooted else -1, count=sum(counts),
        lengths=lengths,
    )  # fmt: skip
    crew.run(crew.plans(op, name, root, block), args, inputs, outputs)
    for rank in range(crew.ranks):
        for i in range(collective.output_pieces(rank)):
            where = f"{op} {name}, rank {rank}, piece {i}"
            assert outputs[rank][i].tobytes() == expected[rank][i].tobytes(), where
        if not in_place:
            for x, original in zip(inputs[rank], originals[rank], strict=True):
                assert x.tobytes() == original.tobytes(), f"rank {rank}: the input was changed"


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_anything(data: st.DataObject, crews: Callable[[int, int], Crew]) -> None:
    op, name = data.draw(st.sampled_from(EVERY))
    ranks = data.draw(st.sampled_from(RANKS))
    root = data.draw(st.integers(0, ranks - 1))
    crew = crews(ranks, data.draw(st.sampled_from([1 << 12, 1 << 20])))
    dtype = data.draw(st.sampled_from(DType))
    reductions = [r for r in ReduceOp if dtype.supports(r) and not (op.scans and r is ReduceOp.AVG)]
    reduction = data.draw(st.sampled_from(reductions))
    plans = crew.plans(op, name, root, None)
    in_place = all(plan.in_place for plan in plans) and data.draw(st.booleans())
    length = st.integers(0, 400)
    if plans[0].uniform or (in_place and op is Op.ALL_TO_ALL):
        counts = [data.draw(length)] * ranks
    else:
        counts = data.draw(st.lists(length, min_size=ranks, max_size=ranks))
    compare(
        crew, op, name, counts, root=root, dtype=dtype, reduction=reduction,
        block_bytes=data.draw(st.sampled_from([64, 128, 1024, 4096])), in_place=in_place,
        seed=data.draw(length), offset=data.draw(st.sampled_from([0, 16, 1, 63])),
    )  # fmt: skip


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_every_algorithm_over_many_blocks(
    op: Op, name: str, crews: Callable[[int, int], Crew]
) -> None:
    for ranks in (2, 3, 5, 8):
        counts = [4001] * ranks
        crew = crews(ranks, 1 << 20)
        compare(crew, op, name, counts, root=ranks - 1, block_bytes=4096)


@pytest.mark.parametrize("dtype", list(DType))
def test_every_reduction_of_every_type(dtype: DType, crews: Callable[[int, int], Crew]) -> None:
    for reduction in ReduceOp:
        if not dtype.supports(reduction):
            continue
        for name in ("ring", "one_shot"):
            compare(
                crews(5, 1 << 20), Op.ALL_REDUCE, name, [1003] * 5, dtype=dtype,
                reduction=reduction, block_bytes=1024, in_place=True, offset=1,
            )  # fmt: skip


def test_blocks_of_the_size_that_is_chosen(crews: Callable[[int, int], Crew]) -> None:
    crew = crews(3, 1 << 20)
    for name in algorithms.names(Op.ALL_REDUCE):
        compare(crew, Op.ALL_REDUCE, name, [200_003] * 3, in_place=True)


def test_blocks_fit_the_staging_and_hold_whole_elements() -> None:
    for slots, depth, area in [([1] * 2, 3, 1 << 20), ([16] * 16, 2, 1 << 18), ([0, 0], 2, 4096)]:
        block = block_bytes_for(slots, depth, area)
        assert block % 4096 == 0
        assert block * max(slots) <= area
    assert native.last_level_cache_bytes() > 0
    with pytest.raises(UnsupportedError, match="UNISONO_STAGING_BYTES"):
        block_bytes_for([64, 64], 2, 64 * 1024)


def test_a_plan_is_loaded_once(crews: Callable[[int, int], Crew]) -> None:
    executor = crews(4, 1 << 20).executors[1]
    assert executor.plan(Op.ALL_REDUCE, "ring", -1) is executor.plan(Op.ALL_REDUCE, "ring", -1)
    with pytest.raises(UnsupportedError, match="no algorithm 'none'"):
        executor.plan(Op.ALL_REDUCE, "none", -1)


def test_nonsense_never_reaches_the_memory(crews: Callable[[int, int], Crew]) -> None:
    crew = crews(1, 1 << 20)
    plan = crew.plans(Op.ALL_REDUCE, "direct", -1, None)[0]
    args = Arguments(op=Op.ALL_REDUCE, dtype=DType.FLOAT32, count=1)
    call = crew.executors[0].prepare(plan, args)
    with pytest.raises(UnisonoError, match="pieces"):
        crew.groups[0].run_pieces(call, [], [], TIMEOUT_S)
    whole: dict[str, Any] = {
        "packed": b"", "rank": 0, "ranks": 1, "pieces_in": 1, "pieces_out": 1, "parts": 1,
        "stages": 1, "slots": [0], "scratch": 0,
    }  # fmt: skip
    for wrong in (
        {"packed": b"x"}, {"rank": 1}, {"slots": []}, {"parts": 0},
        {"packed": bytes([9]) + bytes(47)}, {"packed": bytes([3]) + bytes(47)},
        {"packed": bytes(47) + b"\0", "pieces_in": 0}, {"packed": bytes([1]) + bytes(47)},
    ):  # fmt: skip
        with pytest.raises(UnisonoError, match="plan"):
            native.Plan(**{**whole, **wrong})

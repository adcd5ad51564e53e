"""All ranks of a group as threads, and a comparison of both executors on the same data."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import secrets
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from unisono import algorithms, config, native
from unisono.algorithms.host_layout import Hosts
from unisono.bootstrap.single_copy import NO_SINGLE_COPY, SingleCopyRules
from unisono.errors import UnisonoError
from unisono.execution import reference
from unisono.execution.fold import PAIRS
from unisono.execution.narrow_floats import narrowed
from unisono.execution.native_executor import (
    Arguments,
    Form,
    LoadedPlan,
    NativeExecutor,
    piece_counts,
)
from unisono.schedule import Collective, lower
from unisono.types import DType, Op, ReduceOp

Bytes: TypeAlias = NDArray[np.uint8]
Pieces: TypeAlias = list[list[Bytes]]

TIMEOUT_S = 20.0

EVERYTHING = SingleCopyRules(pieces=dict.fromkeys(Op, range(1 << 62)))
"""All calls use single copy if the plan allows it."""


class ThreadGroup:
    """Native executors of all ranks of a group, each in its own thread."""

    def __init__(
        self,
        ranks: int,
        staging_bytes: int,
        hosts: Hosts | None = None,
        single_copy_rules: SingleCopyRules = NO_SINGLE_COPY,
    ) -> None:
        self.ranks = ranks
        self.hosts = hosts
        self.groups = self.make_groups(staging_bytes)
        self.executors = [
            NativeExecutor(
                group, rank, config.settings({}).stores, hosts, single_copy_rules=single_copy_rules
            )
            for rank, group in enumerate(self.groups)
        ]
        self.pool = concurrent.futures.ThreadPoolExecutor(ranks)

    def make_groups(self, staging_bytes: int) -> list[native.Group]:
        nonce = secrets.token_bytes(16)
        cores = native.usable_cores()
        fd = native.create_segment(
            self.ranks, *native.segment_shape(self.ranks, cores, staging_bytes), nonce
        )
        fds = [fd, *(os.dup(fd) for _ in range(self.ranks - 1))]
        return [native.Group(fds[rank], rank, nonce, cores) for rank in range(self.ranks)]

    def plans(
        self, op: Op, name: str, root: int, block_bytes: int | None, lead: int = 0
    ) -> list[LoadedPlan]:
        loaded = [executor.plan(op, name, root) for executor in self.executors]
        loaded = [plan.single_copy_plan or plan for plan in loaded]
        if block_bytes is None:
            return loaded
        return [dataclasses.replace(plan, block_bytes=block_bytes, lead=lead) for plan in loaded]

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


def counts_of(collective: Collective, counts: list[int], rank: int, *, out: bool) -> list[int]:
    """Returns the number of elements of each of a rank's input pieces (or output pieces, if `out`).
    `counts` has one number for each rank, from which the sizes of the pieces follow.
    """
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
    """Returns random bits for integers and ordinary numbers for floats, so that NaNs are rare."""
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
    """Returns pairs with few distinct values and indices, so that many pairs are equal, and with
    some NaNs.
    """
    value, index = PAIRS[dtype]
    result = np.empty(count, [("value", value), ("index", index)])
    result["value"] = rng.integers(-2, 2, count)
    if value in (np.float32, np.float64):
        result["value"][rng.random(count) < 0.1] = np.nan
    result["index"] = rng.integers(-3, 3, count)
    return result.view(np.uint8)


def unaligned(data: Bytes, offset: int) -> Bytes:
    """Returns a copy of the bytes that starts `offset` bytes after the start of a cache line."""
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
    """Makes outputs share the memory of the inputs, as in an in-place call."""
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
    group: ThreadGroup,
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
    lead: int = 0,
) -> None:
    """Runs both executors on the same data and compares the results."""
    schedule = algorithms.build(op, name, ranks=group.ranks, root=root, hosts=group.hosts)
    collective = schedule.collective
    inputs, outputs = buffers(collective, counts, dtype, seed, offset)
    if in_place:
        alias(collective, inputs, outputs)
    originals = copies(inputs)
    expected = copies(outputs)
    theirs = copies(inputs)
    if in_place:
        alias(collective, theirs, expected)
    block = block_bytes or group.plans(op, name, root, None)[0].block_bytes
    # The reference executor takes only the pieces that a plan uses.
    reference.run(
        lower(schedule, shares_memory=group.plans(op, name, root, None)[0].form is not Form.STAGED),
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
    group.run(group.plans(op, name, root, block, lead), args, inputs, outputs)
    for rank in range(group.ranks):
        for i in range(collective.output_pieces(rank)):
            where = f"{op} {name}, rank {rank}, piece {i}"
            assert outputs[rank][i].tobytes() == expected[rank][i].tobytes(), where
        if not in_place:
            for x, original in zip(inputs[rank], originals[rank], strict=True):
                assert x.tobytes() == original.tobytes(), f"rank {rank}: the input was changed"

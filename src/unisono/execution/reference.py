"""The reference executor: interprets the plans of all ranks in one process.

The native executor must match it bit for bit. So its arithmetic is explicit: one rounding per
operation in the accumulator's type, no fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ScheduleError, UnsupportedError
from unisono.execution.fold import fold
from unisono.schedule import Code, ExecutionPlan, Flag, Record, Ref, Space
from unisono.types import DType, ReduceOp

Bytes: TypeAlias = NDArray[np.uint8]
Pieces: TypeAlias = Sequence[NDArray[Any]]

_PART_ALIGNMENT_BYTES = 64


def part_bytes(piece_bytes: int, parts: int, dtype: DType) -> int:
    """Returns the length of each part of a piece. The last parts may be shorter or empty.

    >>> part_bytes(4000, 3, DType.FLOAT32)
    1344
    """
    size = dtype.size_bytes
    unit = max(1, _PART_ALIGNMENT_BYTES // size)
    count = -(-(piece_bytes // size) // parts)
    return -(-count // unit) * unit * size


def num_blocks(
    plans: Sequence[ExecutionPlan],
    inputs: Sequence[Pieces],
    outputs: Sequence[Pieces],
    dtype: DType,
    block_bytes: int,
) -> int:
    """Returns the number of times that the plans run. They run once for each block of the longest
    part that any rank has.
    """
    longest = max(
        (
            part_bytes(piece.nbytes, plan.parts, dtype)
            for plan, pieces in zip(plans, zip(inputs, outputs, strict=True), strict=True)
            for piece in (*pieces[0], *pieces[1])
        ),
        default=0,
    )
    return max(1, -(-longest // block_bytes))


def run(
    plans: Sequence[ExecutionPlan],
    inputs: Sequence[Pieces],
    outputs: Sequence[Pieces],
    dtype: DType,
    reduce_op: ReduceOp,
    *,
    block_bytes: int,
    depth: int = 2,
) -> None:
    """Runs the plans of all ranks on `inputs[rank][piece]`, into `outputs[rank][piece]`.

    Pieces are 1-D uint8 arrays; an input and an output may be the same memory. Each rank has slots
    for `depth` blocks. Ranks take turns record by record.

    Raises `ScheduleError` for a deadlock, `UnsupportedError` for a reduction that the type does not
    support.

    >>> from unisono.algorithms import build
    >>> from unisono.schedule import lower
    >>> x = [np.array([1, 2], np.int32), np.array([10, 20], np.int32)]
    >>> pieces = [[a.view(np.uint8)] for a in x]
    >>> plans = lower(build("all_reduce", "direct", ranks=2))
    >>> run(plans, pieces, pieces, DType.INT32, ReduceOp.SUM, block_bytes=64)
    >>> x[0].tolist(), x[1].tolist()
    ([11, 22], [11, 22])
    """
    if any(p.reduce_depth for p in plans) and not dtype.supports(reduce_op):
        raise UnsupportedError(f"{dtype.name} elements cannot be reduced by {reduce_op.name}")
    _check_sizes(plans, (*inputs, *outputs), dtype, block_bytes, depth)
    blocks = num_blocks(plans, inputs, outputs, dtype, block_bytes)
    ranks = _begin(plans, inputs, outputs, block_bytes, depth)
    _run_to_end(_Machine(ranks, dtype, reduce_op, block_bytes, depth), ranks, blocks)


def _begin(
    plans: Sequence[ExecutionPlan],
    inputs: Sequence[Pieces],
    outputs: Sequence[Pieces],
    block_bytes: int,
    depth: int,
) -> list[_RankProgress]:
    """Returns the state of all ranks at the start of their plans, with zeros in their slots."""
    ranks = [
        _RankProgress(
            plan=plan, records=tuple(plan.records), pieces=(list(inputs[i]), list(outputs[i]))
        )
        for i, plan in enumerate(plans)
    ]
    for rank in ranks:
        shape = depth, rank.plan.num_slots, block_bytes
        rank.slots = np.zeros(shape, np.uint8)
        rank.tmp = np.zeros((rank.plan.num_tmp, block_bytes), np.uint8)
    return ranks


def _run_to_end(machine: _Machine, ranks: list[_RankProgress], blocks: int) -> None:
    """Runs one record of each rank in turn, until all ranks have run all blocks. Raises
    `ScheduleError` for a deadlock."""
    running = ranks
    while running:
        moved = [rank for rank in running if machine.step(rank)]
        if not moved:
            stuck = "; ".join(
                f"rank {r.plan.rank}, record {r.pc}, block {r.block}" for r in running
            )
            raise ScheduleError(f"deadlock: {stuck}")
        running = [rank for rank in running if rank.block < blocks]


def _check_sizes(
    plans: Sequence[ExecutionPlan],
    buffers: Sequence[Pieces],
    dtype: DType,
    block_bytes: int,
    depth: int,
) -> None:
    if block_bytes < 1 or block_bytes % dtype.size_bytes:
        raise UnsupportedError(f"blocks of {block_bytes} bytes do not hold whole elements")
    if depth < 1:
        raise UnsupportedError(f"slots for {depth} blocks: expected at least one")
    lengths = {piece.nbytes for pieces in buffers for piece in pieces}
    if len(lengths) > 1 and any(plan.uniform for plan in plans):
        raise UnsupportedError("this algorithm needs pieces of equal length")


@dataclass(slots=True, kw_only=True)
class _RankProgress:
    plan: ExecutionPlan
    records: Sequence[Record]
    pieces: tuple[list[NDArray[Any]], list[NDArray[Any]]]
    slots: Bytes = field(default_factory=lambda: np.zeros((0, 0, 0), np.uint8))
    tmp: Bytes = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    shared_memory: dict[tuple[int, int], Bytes] = field(default_factory=dict)
    """Memory from which other ranks read directly (single copy), by block modulo `depth` and
    slot.
    """
    pc: int = 0
    block: int = 0
    progress: int = 0


class _Machine:
    def __init__(
        self,
        ranks: Sequence[_RankProgress],
        dtype: DType,
        reduce_op: ReduceOp,
        block_bytes: int,
        depth: int,
    ) -> None:
        self.ranks = ranks
        self.dtype = dtype
        self.reduce_op = reduce_op
        self.block_bytes = block_bytes
        self.depth = depth

    def step(self, rank: _RankProgress) -> bool:
        """Interprets the rank's next record, unless it has to wait."""
        plan = rank.plan
        if rank.pc == 0 and not self._slots_are_free(rank):
            return False
        record = rank.records[rank.pc]
        base = rank.block * plan.stages
        if record.code is Code.WAIT:
            if self.ranks[record.peer].progress < base + record.value:
                return False
        elif record.code is Code.POST:
            rank.progress = base + record.value
        elif record.code is Code.SHARE:
            self._share(rank, record.dst, self._at(rank, record.src, self._length(rank, record)))
        elif record.code is Code.COPY:
            self._store(rank, record, self._at(rank, record.src, self._length(rank, record)))
        elif record.code is Code.REDUCE:
            args = rank.records[rank.pc + 1 : rank.pc + 1 + record.nsrc]
            length = self._length(rank, record)
            sources = [self._at(rank, arg.src, length) for arg in args]
            divisor = plan.ranks if record.flags & Flag.FINAL else 1
            result = fold(sources, self.dtype, self.reduce_op, divisor)
            self._store(rank, record, result)
            if record.flags & Flag.WRITES_BACK:
                for arg in args:
                    if arg.src.space is Space.SHARED:
                        self._at(rank, arg.src, length)[:] = result
            rank.pc += record.nsrc
        rank.pc += 1
        if rank.pc == len(rank.records):
            rank.pc, rank.block = 0, rank.block + 1
        return True

    def _slots_are_free(self, rank: _RankProgress) -> bool:
        """Returns True if the slots of `depth` blocks ago may be reused, since all other ranks have
        finished that block."""
        if rank.plan.num_slots == 0:
            return True
        need = (rank.block - self.depth + 1) * rank.plan.stages
        return all(other.progress >= need for other in self.ranks if other is not rank)

    def _length(self, rank: _RankProgress, record: Record) -> int:
        """Returns the bytes of the current block of the part that the record names."""
        start, end = self._block_range(rank, record.length)
        return end - start

    def _store(self, rank: _RankProgress, record: Record, data: Bytes) -> None:
        self._at(rank, record.dst, data.size)[:] = data
        if record.flags & Flag.HAS_DST2:
            self._at(rank, record.dst2, data.size)[:] = data
        if record.flags & Flag.SHARES:
            self._share(rank, record.dst2, self._at(rank, record.dst, data.size))

    def _share(self, rank: _RankProgress, slot: Ref, memory: Bytes) -> None:
        rank.shared_memory[rank.block % self.depth, slot.index] = memory

    def _at(self, rank: _RankProgress, ref: Ref, length: int) -> Bytes:
        if ref.space is Space.SLOT:
            return self.ranks[ref.rank].slots[rank.block % self.depth, ref.index, :length]
        if ref.space is Space.SHARED:
            return self.ranks[ref.rank].shared_memory[rank.block % self.depth, ref.index][:length]
        if ref.space is Space.TMP:
            return rank.tmp[ref.index, :length]
        start, end = self._block_range(rank, ref)
        if end - start != length:
            raise ScheduleError(
                f"rank {rank.plan.rank}, block {rank.block}: {ref.space.name} piece {ref.index} "
                f"has {end - start} bytes where {length} are moved"
            )
        piece: Bytes = rank.pieces[ref.space][ref.index]
        return piece[start:end]

    def _block_range(self, rank: _RankProgress, ref: Ref) -> tuple[int, int]:
        piece = rank.pieces[ref.space][ref.index]
        part = part_bytes(piece.nbytes, rank.plan.parts, self.dtype)
        part_start = min(ref.part * part, piece.nbytes)
        part_end = min(part_start + part, piece.nbytes)
        start = min(part_start + rank.block * self.block_bytes, part_end)
        return start, min(start + self.block_bytes, part_end)

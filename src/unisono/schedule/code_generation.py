"""From steps to records: what a rank waits for, reads, writes and posts, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unisono.schedule.buffer_allocation import BufferAllocation
from unisono.schedule.chunk_moves import heads
from unisono.schedule.collective import Numbers
from unisono.schedule.dataflow import Dataflow
from unisono.schedule.record import ROW, Code, Flag, Space, Table, words
from unisono.schedule.staging import Staging


def emit(
    flow: Dataflow, staging: Staging, allocation: BufferAllocation, ranks: range, stages: int
) -> tuple[Table, list[int]]:
    """The records of these ranks one after another, and where those of each begin, and end.

    The records of a step are its waits, then a copy, or a reduction with its operands, then its
    post; those of a rank end in the post `stages`.
    """
    first = staging.starts[ranks.start]
    steps = slice(first, staging.starts[ranks.stop])
    value, closing = staging.steps[steps], staging.closing[steps]
    round_ = staging.round[steps]
    rank = flow.rank[value]
    reads = _Reads.of(flow, value)
    waits = _waits(flow, staging, reads, value, stages)
    waited = np.bincount(reads.step[waits], minlength=len(value))
    args = np.where(reads.count > 1, reads.count, 0)
    ends = np.cumsum(waited + 1 + args + (closing > 0))
    borders = staging.starts[ranks.start : ranks.stop + 1] - first
    edges = np.concatenate(([0], ends))[borders] + np.arange(
        len(borders)
    )  # after so many last posts
    head = ends - (closing > 0) - args - 1 + rank - ranks.start

    table = np.zeros(edges[-1], ROW)
    last = max(len(flow.moves.rounds) - 1, 0)
    _fill(table, edges[1:] - 1, code=Code.POST, value=stages, round=last)
    of, peer = reads.step[waits], reads.operand[waits]
    row = (head - waited.cumsum())[of] + np.arange(len(waits))
    _fill(table, row, code=Code.WAIT, peer=flow.rank[peer], value=staging.post[peer])
    _fill(table, row, round=round_[of], posted=staging.posted[peer])
    posts = np.flatnonzero(closing)
    _fill(table, (head + args + 1)[posts], code=Code.POST, value=closing[posts])
    _fill(table, (head + args + 1)[posts], round=round_[posts])

    src = _sources(flow, staging, allocation, reads)
    length = allocation.length[steps]
    dst, second = _goals(flow, staging, allocation, steps)
    final = (args > 0) & flow.complete[value]
    shared = allocation.shared[value]
    flags = np.where(second == 0, 0, np.where(shared, int(Flag.SHARES), int(Flag.HAS_DST2)))
    flags += final * int(Flag.FINAL)
    code = np.where(args, int(Code.REDUCE), int(Code.COPY))
    code[shared & (value < flow.inputs) & staging.fills[steps]] = Code.SHARE
    single = np.where(args, 0, src[reads.first])
    _fill(table, head, code=code, nsrc=args, flags=flags, dst=dst, dst2=second)
    _fill(table, head, src=single, length=length, round=round_)
    several = np.flatnonzero(args[reads.step])
    of = reads.step[several]
    row = (head - reads.first)[of] + 1 + several
    _fill(table, row, code=Code.ARG, src=src[several], length=length[of], round=round_[of])
    return table, edges.tolist()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Reads:
    """What steps read: step i the values `operand[first[i] : first[i] + count[i]]`, each of them
    of step `step`, and `far` if it is another rank's. An input that is moved is read itself."""

    step: Numbers
    operand: Numbers
    far: NDArray[np.bool_]
    first: Numbers
    count: Numbers

    @classmethod
    def of(cls, flow: Dataflow, value: Numbers) -> _Reads:
        """The reads of steps that deal with these values."""
        made = np.flatnonzero(value >= flow.inputs)
        index = flow.made.searchsorted(value[made])
        begin, count = np.zeros_like(value), np.ones_like(value)
        begin[made] = flow.first[index]
        count[made] = flow.first[index + 1] - flow.first[index]
        first = count.cumsum() - count
        step = np.arange(len(value)).repeat(count)
        operand = value[step]
        inside = np.flatnonzero(operand >= flow.inputs)
        operand[inside] = flow.operands[(begin - first)[step[inside]] + inside]
        far = flow.rank[operand] != flow.rank[value[step]]
        return cls(step=step, operand=operand, far=far, first=first, count=count)


def _waits(flow: Dataflow, staging: Staging, reads: _Reads, value: Numbers, stages: int) -> Numbers:
    """The reads that must be waited for: they need a later post than any before of that peer."""
    far = np.flatnonzero(reads.far)
    peer, need = flow.rank[reads.operand[far]], staging.post[reads.operand[far]]
    ranks = flow.moves.places.schedule.collective.ranks
    pair = flow.rank[value[reads.step[far]]] * ranks + peer
    order = pair.argsort(kind="stable")
    reached = np.maximum.accumulate((pair * stages + need)[order])
    found: Numbers = np.sort(far[order[heads(reached)]])
    return found


def _sources(
    flow: Dataflow, staging: Staging, allocation: BufferAllocation, reads: _Reads
) -> Numbers:
    """Where each read finds its value."""
    owner, slot = flow.rank[reads.operand], staging.slot[reads.operand]
    shared = words(Space.SHARED, owner, slot)
    remote = np.where(allocation.shared[reads.operand], shared, words(Space.SLOT, owner, slot))
    found: Numbers = np.where(reads.far, remote, allocation.ref[reads.operand])
    return found


def _goals(
    flow: Dataflow, staging: Staging, allocation: BufferAllocation, steps: slice
) -> tuple[Numbers, Numbers]:
    """Where each step writes: to the value's home and its slot, or to one of them."""
    value, fills = staging.steps[steps], staging.fills[steps]
    rank, location = flow.rank[value], flow.location[value]
    ref = np.where(value < flow.inputs, 0, allocation.ref[value])
    brought = np.flatnonzero((value < flow.inputs) & ~fills)
    at = location[brought]
    collective = flow.moves.places.schedule.collective
    piece, part = collective.output_piece(at), at % collective.parts
    ref[brought] = words(Space.OUT, rank[brought], piece, part)
    slot = np.where(fills, words(Space.SLOT, rank, staging.slot[value]), 0)
    return np.where(ref, ref, slot), np.where(ref, slot, 0)


def _fill(table: Table, rows: Numbers, **columns: ArrayLike) -> None:
    for name, column in columns.items():
        table[name][rows] = column

"""Generation of the records of each rank from its steps: waits, copies, reductions and posts, as
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unisono.schedule.buffer_allocation import Allocation
from unisono.schedule.chunk_moves import run_starts
from unisono.schedule.collective import Numbers
from unisono.schedule.dataflow import Dataflow
from unisono.schedule.record import ROW, Code, Flag, Space, Table, words
from unisono.schedule.staging import Staging


def emit(
    flow: Dataflow, staging: Staging, allocation: Allocation, ranks: range, stages: int
) -> tuple[Table, list[int]]:
    """Generates the records of these ranks, one rank after another.

    Returns the records, and the index at which each rank's records begin, followed by the number of
    records. The records of a step are its waits, then a copy, or a reduction with its operands,
    then its post. The records of a rank end with the post `stages`.
    """
    first = staging.starts[ranks.start]
    steps = slice(first, staging.starts[ranks.stop])
    value, closing = staging.steps[steps], staging.closing[steps]
    reads = _Reads.of(flow, value)
    waits = _waits(flow, staging, reads, value, stages)
    waited = np.bincount(reads.step[waits], minlength=len(value))
    args = np.where(reads.count > 1, reads.count, 0)
    ends = np.cumsum(waited + 1 + args + (closing > 0))
    borders = staging.starts[ranks.start : ranks.stop + 1] - first
    edges = np.concatenate(([0], ends))[borders] + np.arange(
        len(borders)
    )  # adds the final POST record of each preceding rank
    head = ends - (closing > 0) - args - 1 + flow.rank[value] - ranks.start
    table = np.zeros(edges[-1], ROW)
    last = max(len(flow.moves.rounds) - 1, 0)
    _fill(table, edges[1:] - 1, code=Code.POST, value=stages, round=last)
    _fill_waits_and_posts(table, flow, staging, reads, waits, steps, head, args, waited)
    _fill_copies_and_reductions(table, flow, staging, allocation, reads, steps, head, args)
    return table, edges.tolist()


def _fill_waits_and_posts(
    table: Table,
    flow: Dataflow,
    staging: Staging,
    reads: _Reads,
    waits: Numbers,
    steps: slice,
    head: Numbers,
    args: Numbers,
    waited: Numbers,
) -> None:
    """Fills the wait records and the post record of each step.

    `head` is the index of the step's copy or reduction record. `waited` is the number of wait
    records before this record, and `args` the number of operand records after this record.
    """
    closing, round_ = staging.closing[steps], staging.round[steps]
    of, peer = reads.step[waits], reads.operand[waits]
    row = (head - waited.cumsum())[of] + np.arange(len(waits))
    _fill(table, row, code=Code.WAIT, peer=flow.rank[peer], value=staging.post[peer])
    _fill(table, row, round=round_[of], posted=staging.posted[peer])
    posts = np.flatnonzero(closing)
    _fill(table, (head + args + 1)[posts], code=Code.POST, value=closing[posts])
    _fill(table, (head + args + 1)[posts], round=round_[posts])


def _fill_copies_and_reductions(
    table: Table,
    flow: Dataflow,
    staging: Staging,
    allocation: Allocation,
    reads: _Reads,
    steps: slice,
    head: Numbers,
    args: Numbers,
) -> None:
    """Fills the copy or reduction record of each step, and its operand records."""
    value, round_ = staging.steps[steps], staging.round[steps]
    src = _sources(flow, staging, allocation, reads)
    length = allocation.length[steps]
    dst, second = _destinations(flow, staging, allocation, steps)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Reads:
    """Values that the steps read.

    Step i reads the values `operand[first[i] : first[i] + count[i]]`. `step` is the step of each
    read. `remote` marks the reads of another rank's values. A step that moves an input reads the
    input itself.
    """

    step: Numbers
    operand: Numbers
    remote: NDArray[np.bool_]
    first: Numbers
    count: Numbers

    @classmethod
    def of(cls, flow: Dataflow, value: Numbers) -> _Reads:
        """Returns the reads of the steps that write or move these values."""
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
        remote = flow.rank[operand] != flow.rank[value[step]]
        return cls(step=step, operand=operand, remote=remote, first=first, count=count)


def _waits(flow: Dataflow, staging: Staging, reads: _Reads, value: Numbers, stages: int) -> Numbers:
    """Returns the reads before which the rank must wait for a post of a peer. This post is later
    than all posts of the peer for which the rank has already waited.
    """
    remote = np.flatnonzero(reads.remote)
    peer, need = flow.rank[reads.operand[remote]], staging.post[reads.operand[remote]]
    ranks = flow.moves.places.schedule.collective.ranks
    pair = flow.rank[value[reads.step[remote]]] * ranks + peer
    order = pair.argsort(kind="stable")
    reached = np.maximum.accumulate((pair * stages + need)[order])
    found: Numbers = np.sort(remote[order[run_starts(reached)]])
    return found


def _sources(flow: Dataflow, staging: Staging, allocation: Allocation, reads: _Reads) -> Numbers:
    """Returns the reference of the memory that each read accesses."""
    owner, slot = flow.rank[reads.operand], staging.slot[reads.operand]
    shared = words(Space.SHARED, owner, slot)
    remote_ref = np.where(allocation.shared[reads.operand], shared, words(Space.SLOT, owner, slot))
    found: Numbers = np.where(reads.remote, remote_ref, allocation.address[reads.operand])
    return found


def _destinations(
    flow: Dataflow, staging: Staging, allocation: Allocation, steps: slice
) -> tuple[Numbers, Numbers]:
    """Returns the references that each step writes: the memory of the value, its slot, or both."""
    value, fills = staging.steps[steps], staging.fills[steps]
    rank, location = flow.rank[value], flow.location[value]
    address = np.where(value < flow.inputs, 0, allocation.address[value])
    copied_out = np.flatnonzero((value < flow.inputs) & ~fills)
    at = location[copied_out]
    collective = flow.moves.places.schedule.collective
    piece, part = collective.output_piece(at), at % collective.parts
    address[copied_out] = words(Space.OUT, rank[copied_out], piece, part)
    slot = np.where(fills, words(Space.SLOT, rank, staging.slot[value]), 0)
    return np.where(address, address, slot), np.where(address, slot, 0)


def _fill(table: Table, rows: Numbers, **columns: ArrayLike) -> None:
    for name, column in columns.items():
        table[name][rows] = column

"""Where values lie in the memory of their own ranks.

What a rank is given lies in its input. A value that is made has a place in the output if it is
final or used locally later and the output contains its location, else in private memory if used
locally later, else none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.schedule.collective import Numbers
from unisono.schedule.dataflow import Dataflow
from unisono.schedule.record import Space, words
from unisono.schedule.single_copy_hazards import first_written, places_of, returned_in_time
from unisono.schedule.staging import Staging
from unisono.types import Op


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BufferAllocation:
    """References (see `record.words`) to where values are, and what follows for each rank.

    `ref` is that of each value, 0 where it has none; `length` is for each step a part of the
    rank's input or output that is as long as the chunk. `num_tmp` are the private places of each
    rank; `uniform` says whether it has no such part for some chunk, so that all pieces must have
    one length, and `in_place` whether its input may be the memory of its output. `shared` are the
    values that other ranks read where they are.
    """

    ref: Numbers
    shared: NDArray[np.bool_]
    length: Numbers
    num_tmp: Numbers
    uniform: NDArray[np.bool_]
    in_place: NDArray[np.bool_]


def allocate_buffers(
    flow: Dataflow, staging: Staging, *, shares_memory: bool = False
) -> BufferAllocation:
    """Find a place for every value. With `shares_memory`, values that stay where they are until the
    end of the call are shared: what ranks are given, and results."""
    collective = flow.moves.places.schedule.collective
    needed = np.zeros(len(flow.rank), np.bool_)
    needed[flow.operands[~staging.far]] = needed[flow.outputs] = True
    ref = np.zeros(len(flow.rank), np.int64)
    chunk = flow.chunk[: flow.inputs]
    piece, part = collective.input_piece(chunk), chunk % collective.parts
    ref[: flow.inputs] = words(Space.IN, flow.rank[: flow.inputs], piece, part)

    made = staging.steps[(staging.steps >= flow.inputs) & needed[staging.steps]]
    final = _wanted(flow)[flow.place[made]]
    out, tmp = made[final], made[~final]
    at = flow.location[out]
    piece, part = collective.output_piece(at), at % collective.parts
    ref[out] = words(Space.OUT, flow.rank[out], piece, part)
    num_tmp = np.zeros(collective.ranks, np.int64)
    if len(tmp):
        index, num_tmp = _first_come(flow.place[tmp], flow.rank[tmp], collective.ranks)
        ref[tmp] = words(Space.TMP, flow.rank[tmp], index)
    written = needed & (ref & 0xFF == Space.OUT)
    length, uniform = _lengths(flow, staging)
    in_place = _in_place(flow, staging, written)
    shared = np.zeros(len(flow.rank), np.bool_)
    if shares_memory:
        shared[: flow.inputs] = shared[flow.outputs] = True
        shared &= staging.slot >= 0
        in_place &= returned_in_time(flow, staging, shared, written)
    return BufferAllocation(
        ref=ref,
        shared=shared,
        length=length,
        num_tmp=num_tmp,
        uniform=uniform,
        in_place=in_place,
    )


def _lengths(flow: Dataflow, staging: Staging) -> tuple[Numbers, NDArray[np.bool_]]:
    """`length` and `uniform`."""
    collective = flow.moves.places.schedule.collective
    rank, chunk = flow.rank[staging.steps], flow.chunk[staging.steps]
    part = chunk % collective.parts
    given, wanted = collective.holds(rank, chunk), collective.wants(rank, chunk)
    length = np.where(
        given,
        words(Space.IN, rank, collective.input_piece(chunk), part),
        words(Space.OUT, rank, collective.output_piece(chunk), part),
    )
    uniform = np.zeros(collective.ranks, np.bool_)
    foreign = np.flatnonzero(~(given | wanted))
    if len(foreign):
        # A relay of gather, scatter or all_to_all knows but its own pieces' lengths.
        space = Space.OUT if collective.op is Op.SCATTER else Space.IN
        length[foreign] = words(space, rank[foreign], 0, part[foreign])
        uniform[rank[foreign]] = True
    return length, uniform


def _wanted(flow: Dataflow) -> NDArray[np.bool_]:
    """Which places are of the output."""
    places = flow.moves.places
    wanted = np.zeros(len(places), np.bool_)
    wanted[places.number(places.wanted)] = True
    return wanted


def _first_come(place: Numbers, rank: Numbers, ranks: int) -> tuple[Numbers, Numbers]:
    """Places numbered within their ranks, in the order in which they come, rank after rank; and
    how many each rank has."""
    _, first, which = np.unique(place, return_index=True, return_inverse=True)
    counts = np.bincount(rank[first], minlength=ranks)
    number = np.empty_like(first)
    number[first.argsort()] = np.arange(len(first))
    return number[which] - (counts.cumsum() - counts)[rank], counts


def _in_place(flow: Dataflow, staging: Staging, written: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """For each rank whether it reads no input after it wrote the output that may lie there.

    `written` are the values made whose place is the output.
    """
    steps = staging.steps
    moved = steps < flow.inputs
    first = first_written(flow, staging, written[steps] | (moved & ~staging.fills))
    local = np.flatnonzero(~staging.far & (flow.operands < flow.inputs))
    read = np.concatenate((steps[moved], flow.operands[local]))
    at = np.concatenate((np.flatnonzero(moved), staging.when()[staging.target[local]]))
    there = places_of(flow, read)
    in_place = np.ones(flow.moves.places.schedule.collective.ranks, np.bool_)
    in_place[flow.rank[read[first[there] < at]]] = False
    return in_place

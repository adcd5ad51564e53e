"""Allocation of memory for the values of each rank.

The contributions of a rank are in its input. Each written value gets at most one address on its own
rank:

- in the output, if the value is final or its rank reads the value later, and if the output contains
  the value's location;
- in private memory, if its rank reads the value later and the output does not contain the location;
- no address in all other cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.schedule.collective import Numbers
from unisono.schedule.dataflow import Dataflow
from unisono.schedule.record import Space, words
from unisono.schedule.single_copy_hazards import first_written, in_place_outputs, read_in_time
from unisono.schedule.staging import Staging
from unisono.types import Op


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Allocation:
    """References (see `record.words`) to the memory of all values, and properties of each rank.

    - `address`: the reference of each value, 0 for a value without memory.
    - `shared`: the values that other ranks read in place (single copy).
    - `length`: for each step, a reference to a part of the rank's input or output that is as long
      as the step's chunk.
    - `num_tmp`: the number of private places of each rank.
    - `uniform`: true for a rank that moves a chunk although no part of the rank's own input or
      output is as long as the chunk. All pieces must then have the same length.
    - `in_place`: true for a rank whose input and output may be the same memory.
    """

    address: Numbers
    shared: NDArray[np.bool_]
    length: Numbers
    num_tmp: Numbers
    uniform: NDArray[np.bool_]
    in_place: NDArray[np.bool_]

    def shares(self, space: Space) -> bool:
        """Returns true if some rank reads memory of another rank in this space, in place."""
        return bool((self.address[self.shared] & 0xFF == space).any())


def allocate(
    flow: Dataflow,
    staging: Staging,
    *,
    shares_memory: bool = False,
    hosts: Sequence[Sequence[int]] | None = None,
) -> Allocation:
    """Allocates memory for every value.

    With `shares_memory`, other ranks read a value in place if the value does not change before the
    end of the call. Such values are inputs and results. `hosts` are the ranks of each host (None: a
    single host); a value that a rank of another host reads is staged for all its readers.
    """
    collective = flow.moves.places.schedule.collective
    needed = np.zeros(len(flow.rank), np.bool_)
    needed[flow.operands[~staging.remote]] = needed[flow.outputs] = True
    address = np.zeros(len(flow.rank), np.int64)
    chunk = flow.chunk[: flow.inputs]
    piece, part = collective.input_piece(chunk), chunk % collective.parts
    address[: flow.inputs] = words(Space.IN, flow.rank[: flow.inputs], piece, part)

    made = staging.steps[(staging.steps >= flow.inputs) & needed[staging.steps]]
    final = _wanted(flow)[flow.place[made]]
    out, tmp = made[final], made[~final]
    at = flow.location[out]
    piece, part = collective.output_piece(at), at % collective.parts
    address[out] = words(Space.OUT, flow.rank[out], piece, part)
    num_tmp = np.zeros(collective.ranks, np.int64)
    if len(tmp):
        index, num_tmp = _number_places(flow.place[tmp], flow.rank[tmp], collective.ranks)
        address[tmp] = words(Space.TMP, flow.rank[tmp], index)
    written = needed & (address & 0xFF == Space.OUT)
    length, uniform = _lengths(flow, staging)
    in_place = _in_place(flow, staging, written)
    shared = np.zeros(len(flow.rank), np.bool_)
    if shares_memory:
        shared[: flow.inputs] = shared[flow.outputs] = True
        shared &= staging.slot >= 0
        if hosts is not None:
            shared[_read_elsewhere(flow, staging, hosts)] = False
        in_place &= read_in_time(flow, staging, shared, written)
    return Allocation(
        address=address,
        shared=shared,
        length=length,
        num_tmp=num_tmp,
        uniform=uniform,
        in_place=in_place,
    )


def _read_elsewhere(flow: Dataflow, staging: Staging, hosts: Sequence[Sequence[int]]) -> Numbers:
    """Returns the values that ranks of other hosts read."""
    host = np.empty(flow.moves.places.schedule.collective.ranks, np.int64)
    for number, ranks in enumerate(hosts):
        host[list(ranks)] = number
    value, into = flow.operands[staging.remote], staging.target[staging.remote]
    found: Numbers = value[host[flow.rank[value]] != host[flow.rank[into]]]
    return found


def _lengths(flow: Dataflow, staging: Staging) -> tuple[Numbers, NDArray[np.bool_]]:
    """Returns the attributes `length` and `uniform` of `Allocation`."""
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
        # In gather, scatter and all_to_all, a rank that forwards a chunk of other ranks knows only
        # the lengths of its own pieces.
        space = Space.OUT if collective.op is Op.SCATTER else Space.IN
        length[foreign] = words(space, rank[foreign], 0, part[foreign])
        uniform[rank[foreign]] = True
    return length, uniform


def _wanted(flow: Dataflow) -> NDArray[np.bool_]:
    """Returns a mask of the places that belong to the output."""
    places = flow.moves.places
    wanted = np.zeros(len(places), np.bool_)
    wanted[places.number(places.wanted)] = True
    return wanted


def _number_places(place: Numbers, rank: Numbers, ranks: int) -> tuple[Numbers, Numbers]:
    """Numbers the places of each rank in the order of their first occurrence.

    Returns two arrays: the index that each entry of `place` gets on its rank, and how many places
    each rank has. The entries are ordered by rank.
    """
    _, first, which = np.unique(place, return_index=True, return_inverse=True)
    counts = np.bincount(rank[first], minlength=ranks)
    number = np.empty_like(first)
    number[first.argsort()] = np.arange(len(first))
    return number[which] - (counts.cumsum() - counts)[rank], counts


def _in_place(flow: Dataflow, staging: Staging, written: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Returns true for each rank whose input and output may be the same memory.

    Such a rank reads no input after it has written the output at the input's address. `written`
    marks the values that the rank writes to the output.
    """
    steps = staging.steps
    moved = steps < flow.inputs
    first = first_written(flow, staging, written[steps] | (moved & ~staging.fills))
    local = np.flatnonzero(~staging.remote & (flow.operands < flow.inputs))
    read = np.concatenate((steps[moved], flow.operands[local]))
    at = np.concatenate((np.flatnonzero(moved), staging.step_of()[staging.target[local]]))
    there = in_place_outputs(flow, read)
    in_place = np.ones(flow.moves.places.schedule.collective.ranks, np.bool_)
    in_place[flow.rank[read[first[there] < at]]] = False
    return in_place

"""Analysis of single copy (reads of another rank's memory in place), which finds the ranks that can
safely overwrite their own input.

Memory that other ranks read in place must not change before all readers have finished. Results
never change. An input changes only if the output is in the same memory. In this case, the owner
must know that all readers have finished before the owner writes the output.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.schedule.collective import Numbers
from unisono.schedule.dataflow import Dataflow
from unisono.schedule.staging import Staging
from unisono.types import Op


def in_place_outputs(flow: Dataflow, given: Numbers) -> Numbers:
    """Returns the output places that have the same memory as these inputs in an in-place call."""
    places = flow.moves.places
    collective = places.schedule.collective
    if collective.op is not Op.ALL_TO_ALL:
        return flow.place[given]  # input and output of a chunk share one place
    chunk = flow.chunk[given]
    pair = collective.output_piece(chunk) + collective.input_piece(chunk) * collective.ranks
    chunk = pair * collective.parts + chunk % collective.parts
    return places.number(flow.rank[given] * places.schedule.num_locations + chunk)


def first_written(flow: Dataflow, staging: Staging, writes: NDArray[np.bool_]) -> Numbers:
    """Returns the first step that writes each place, or the number of steps if no step writes the
    place.
    """
    writing = np.flatnonzero(writes)[::-1]
    first = np.full(len(flow.moves.places), len(staging.steps))
    first[flow.place[staging.steps[writing]]] = writing
    return first


def read_in_time(
    flow: Dataflow, staging: Staging, shared: NDArray[np.bool_], written: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Returns true for each rank that, in an in-place call, never overwrites an input before all
    readers have finished.

    A rank knows that a reader has finished if, before its write, the rank waits for a post that
    follows the read. `written` marks the values that the rank writes to the output.
    """
    ranks, steps = flow.moves.places.schedule.collective.ranks, staging.steps
    step_of = staging.step_of()
    reading = np.flatnonzero(staging.remote & shared[flow.operands] & (flow.operands < flow.inputs))
    given, into = flow.operands[reading], staging.target[reading]
    overwritten = first_written(flow, staging, written[steps])[in_place_outputs(flow, given)]
    owner, reader = flow.rank[given], flow.rank[into]

    # `needed` is the number of the reader's first post after its read. `known` is the number of the
    # reader's last post for which the owner has waited before its write.
    posts = np.concatenate(([0], (staging.closing > 0).cumsum()))
    needed = posts[step_of[into]] - posts[staging.starts[reader]] + 1
    known = _waited(flow, staging, step_of, owner * ranks + reader, overwritten)
    result = np.ones(ranks, np.bool_)
    result[owner[(overwritten < len(steps)) & (known < needed)]] = False
    return result


def _waited(
    flow: Dataflow, staging: Staging, step_of: Numbers, pair: Numbers, until: Numbers
) -> Numbers:
    """Returns the highest post of the peer that the rank has waited for at step `until`, for each
    pair of a rank and a peer.

    A pair is encoded as rank * (number of ranks) + peer. The result includes the waits of step
    `until`.
    """
    ranks, span = flow.moves.places.schedule.collective.ranks, len(staging.steps) + 1
    remote = np.flatnonzero(staging.remote)
    value, into = flow.operands[remote], staging.target[remote]
    at = (flow.rank[into] * ranks + flow.rank[value]) * span + step_of[into]
    order = at.argsort(kind="stable")
    stages = int(staging.posts.max()) + 1
    highest = np.maximum.accumulate(at[order] // span * stages + staging.post[value[order]])
    index = at[order].searchsorted(pair * span + until, "right") - 1
    found: Numbers = np.where(index >= 0, highest[index] - pair * stages, 0)
    return found

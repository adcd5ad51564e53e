"""Where memory that a rank shares with others may be written again in the same block.

Memory that a rank shares must stay as it is until all have read it. Results do: nothing is written
over them. What a rank was given does too, unless the output is written to the same memory: then
each reader must be known to be done before that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.schedule.collective import Numbers
from unisono.schedule.dataflow import Dataflow
from unisono.schedule.staging import Staging
from unisono.types import Op


def places_of(flow: Dataflow, given: Numbers) -> Numbers:
    """For inputs, the place of the output that is the same memory, where a call is in place."""
    places = flow.moves.places
    collective = places.schedule.collective
    if collective.op is not Op.ALL_TO_ALL:
        return flow.place[given]  # input and output of a chunk are one place
    chunk = flow.chunk[given]
    pair = collective.output_piece(chunk) + collective.input_piece(chunk) * collective.ranks
    chunk = pair * collective.parts + chunk % collective.parts
    return places.number(flow.rank[given] * places.schedule.num_locations + chunk)


def first_written(flow: Dataflow, staging: Staging, writes: NDArray[np.bool_]) -> Numbers:
    """For each place the first step that writes there, of those that do: else, after the last."""
    writing = np.flatnonzero(writes)[::-1]
    first = np.full(len(flow.moves.places), len(staging.steps))
    first[flow.place[staging.steps[writing]]] = writing
    return first


def returned_in_time(
    flow: Dataflow, staging: Staging, shared: NDArray[np.bool_], written: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """For each rank whether, with input and output in one memory, it writes nothing to what it
    shares before all readers are done.

    It knows of a reader if, before it writes, it waits for a post of the reader that follows the
    reading. `written` are the values made whose home is the output.
    """
    ranks, steps = flow.moves.places.schedule.collective.ranks, staging.steps
    when = staging.when()
    reading = np.flatnonzero(staging.far & shared[flow.operands] & (flow.operands < flow.inputs))
    given, into = flow.operands[reading], staging.target[reading]
    overwritten = first_written(flow, staging, written[steps])[places_of(flow, given)]
    owner, reader = flow.rank[given], flow.rank[into]

    # The first post of the reader after its reading, against the posts of it that the owner has
    # waited for when it writes.
    posts = np.concatenate(([0], (staging.closing > 0).cumsum()))
    needed = posts[when[into]] - posts[staging.starts[reader]] + 1
    known = _waited(flow, staging, when, owner * ranks + reader, overwritten)
    result = np.ones(ranks, np.bool_)
    result[owner[(overwritten < len(steps)) & (known < needed)]] = False
    return result


def _waited(
    flow: Dataflow, staging: Staging, when: Numbers, pair: Numbers, until: Numbers
) -> Numbers:
    """For each pair, a rank times the number of ranks plus a peer, the highest post of the peer
    that the rank has waited for at a step, that step's own waits included."""
    ranks, span = flow.moves.places.schedule.collective.ranks, len(staging.steps) + 1
    far = np.flatnonzero(staging.far)
    value, into = flow.operands[far], staging.target[far]
    at = (flow.rank[into] * ranks + flow.rank[value]) * span + when[into]
    order = at.argsort(kind="stable")
    stages = int(staging.posts.max()) + 1
    highest = np.maximum.accumulate(at[order] // span * stages + staging.post[value[order]])
    index = at[order].searchsorted(pair * span + until, "right") - 1
    found: Numbers = np.where(index >= 0, highest[index] - pair * stages, 0)
    return found

"""The choice of the points at which a chain of operations is cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_SLACK = 0.1
"""Share by which the most expensive stage may exceed the least possible cost, if fewer bytes cross
the cuts then."""

_Floats = NDArray[np.float64]


def choose_cuts(costs: Sequence[float], crossing: Sequence[float], stages: int) -> list[int]:
    """Returns the number of the first operation of each stage.

    `costs`: the cost of each operation, in FLOPs. `crossing`: for each operation, the bytes of all
    values that cross a cut before it; infinite where no cut is possible. The largest cost of a
    stage is at most 10 % above the least possible one. Among these cuts, the sum of the crossing
    bytes is minimal, and then the largest cost. Every stage has an operation with a cost. Raises
    `ValueError` if there are too few possible cuts.

    >>> choose_cuts([4, 4, 0, 0, 4, 4], [0, 8, 8, 2, 8, 8], 2)
    [0, 3]
    >>> choose_cuts([4, 4, 0, 0, 4, 4], [0, 8, 8, 2, 8, 8], 4)
    [0, 1, 3, 5]
    """
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    places = _candidates(crossing, sums)
    if len(places) < stages:
        raise ValueError(
            f"{stages} stages need {stages - 1} cuts, but the values of the graph allow "
            f"{len(places) - 1}; {len(places)} stages work"
        )
    weights = sums[[*places, len(costs)]]
    sizes = np.array([0.0, *(crossing[place] for place in places[1:])])
    costs_of = _costs_of_parts(weights)
    least = _least_cost(costs_of, stages)
    firsts = _fewest_bytes(costs_of, sizes, stages, least * (1 + _SLACK))
    limits = np.unique(costs_of[(costs_of >= least) & (costs_of <= least * (1 + _SLACK))])
    low, high = 0, len(limits) - 1
    while low < high:  # the least limit that needs no more bytes
        middle = (low + high) // 2
        found = _fewest_bytes(costs_of, sizes, stages, limits[middle])
        if sizes[found].sum() <= sizes[firsts].sum():
            high, firsts = middle, found
        else:
            low = middle + 1
    return [places[first] for first in firsts]


def _candidates(crossing: Sequence[float], sums: _Floats) -> list[int]:
    """Returns the possible first operations of stages, the first operation included.

    `sums`: the cost before each operation, and the whole cost. Of cuts between the same two
    operations with costs, only the cut with the fewest bytes remains.
    """
    best: dict[float, int] = {}
    for place in range(1, len(crossing)):
        cost = float(sums[place])
        if not np.isfinite(crossing[place]) or not 0 < cost < sums[-1]:
            continue
        if cost not in best or crossing[place] < crossing[best[cost]]:
            best[cost] = place
    return [0, *best.values()]


def _costs_of_parts(weights: _Floats) -> _Floats:
    """Returns the cost of the part from place i up to place j, as a matrix; infinite for empty
    parts."""
    costs = weights[None, :] - weights[:-1, None]
    costs[np.arange(len(costs))[:, None] >= np.arange(len(weights))[None, :]] = np.inf
    return costs


def _least_cost(costs_of: _Floats, stages: int) -> float:
    """Returns the smallest possible cost of the most expensive stage."""
    least = np.full(len(costs_of), np.inf)
    least[0] = 0.0
    for _ in range(stages):
        # the last part begins at place i and ends at place j
        row = np.maximum(least[:, None], costs_of).min(axis=0)
        least, whole = row[:-1], row[-1]
    return float(whole)


def _fewest_bytes(costs_of: _Floats, sizes: _Floats, stages: int, limit: float) -> list[int]:
    """Returns the first places of stages of at most this cost, with the fewest crossing bytes."""
    allowed = np.where(costs_of <= limit * (1 + 1e-12), 0.0, np.inf)
    least = np.full(len(costs_of), np.inf)
    least[0] = 0.0
    choices = []
    for _ in range(stages):
        total = (least + sizes)[:, None] + allowed
        choices.append(total.argmin(axis=0))
        row = total.min(axis=0)
        least, whole = row[:-1], row[-1]
    firsts, end = [], len(costs_of)
    for choice in reversed(choices):
        end = int(choice[end])
        firsts.append(end)
    assert np.isfinite(whole)  # the limit is at least the least possible cost
    return firsts[::-1]

"""Distances and bisections of networks, from formulas for known structures, else by search."""

from __future__ import annotations

from collections import deque
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

import numpy as np

from unisono.topology.breadth_first_search import hops_from
from unisono.topology.ragged_lists import Floats, Ints, ints

if TYPE_CHECKING:
    from unisono.topology.graph import Topology

_CELLS = 1 << 24
_EVERY_CUT = 12
"""Maximum number of ranks for which all cuts are tried."""
_SOME_CUTS = 512
"""Maximum number of nodes for which the cut along the second eigenvector is tried."""


def distance_counts(topology: Topology) -> Floats:
    """Returns the number of ordered pairs of ranks at each distance of 0, 1, 2, ... links.

    Raises `ValueError` if a rank cannot reach another rank.
    """
    known = topology.routing.distance_counts(topology)
    if known is not None:
        return known
    ranks, weights = topology.routing.representatives(topology) or _by_switch(topology)
    counts = np.zeros(1)
    step = max(1, _CELLS // topology.num_nodes)
    for first in range(0, len(ranks), step):
        hops = hops_from(topology, ranks[first : first + step])[:, : topology.num_ranks]
        if (hops < 0).any():
            row, rank = np.argwhere(hops < 0)[0]
            raise ValueError(f"{topology.name}: no path from rank {ranks[first + row]} to {rank}")
        for row, weight in zip(hops, weights[first:], strict=False):
            found = np.bincount(row) * weight
            size = max(len(counts), len(found))
            counts = np.pad(counts, (0, size - len(counts))) + np.pad(found, (0, size - len(found)))
    return counts


def _by_switch(topology: Topology) -> tuple[Ints, Floats]:
    """Returns ranks that represent all ranks. Ranks whose only link goes to the same switch have
    one representative. Each other rank represents itself."""
    links, n = topology.links, topology.num_ranks
    out = np.bincount(links.src, minlength=topology.num_nodes)[:n]
    into = np.bincount(links.dst, minlength=topology.num_nodes)[:n]
    place = -1 - np.arange(n)
    leaf = (links.src < n) & (links.dst >= n)
    alone = (
        leaf & (out[np.minimum(links.src, n - 1)] == 1) & (into[np.minimum(links.src, n - 1)] == 1)
    )
    place[links.src[alone]] = links.dst[alone]
    _, first, counts = np.unique(place, return_index=True, return_counts=True)
    return ints(first), counts.astype(np.float64)


def bisection(topology: Topology) -> float:
    """Implements `Topology.bisection_Bps`."""
    return middle(topology)[0]


def middle(topology: Topology) -> tuple[float, int]:
    """Returns the bisection, and the number of ranks on the side from which it is measured.

    This side has half of the ranks. For an odd number of rows, leaves or groups, the side has
    slightly more or fewer ranks.

    For a network of unknown kind with up to 12 ranks, every half of the ranks is tried, with each
    switch on the better side (maximum flow). With more ranks, the lower half is tried, and the half
    below the median of the Laplacian's second eigenvector (Fiedler, 1973). The result is then close
    to the minimum over all cuts, never below it.

    >>> from unisono.topology import hypercube
    >>> width_Bps, ranks = middle(hypercube(3))
    >>> bool(width_Bps == 4 * hypercube(3).links.bandwidth_Bps[0]), ranks
    (True, 4)
    """
    n = topology.num_ranks
    if n < 2:
        return 0.0, n
    side = topology.routing.bisection_sides(topology)
    if side is not None:
        return _across(topology, side), int((side[:n] == 0).sum())
    return min(_flow(topology, low) for low in _cuts(topology)), n // 2


def _across(topology: Topology, side: Ints) -> float:
    """Returns the bytes per second from side 0 to side 1 of a cut.

    A switch of side -1 is assigned to the side that makes the cut smaller. Its links go only to
    nodes of sides 0 and 1.
    """
    links, rate = topology.links, topology.links.bandwidth_Bps
    one, two = side[links.src], side[links.dst]
    total = float(rate[(one == 0) & (two == 1)].sum())
    free = np.flatnonzero(side < 0)
    if len(free):
        n = topology.num_nodes
        fed = np.bincount(links.dst, np.where((one == 0) & (two < 0), rate, 0), minlength=n)
        drained = np.bincount(links.src, np.where((one < 0) & (two == 1), rate, 0), minlength=n)
        total += float(np.minimum(fed, drained)[free].sum())
    return total


def _cuts(topology: Topology) -> list[Ints]:
    """Returns the halves of the ranks to try, each as a list of ranks."""
    n = topology.num_ranks
    if n <= _EVERY_CUT:
        return [ints(half) for half in combinations(range(n), n // 2) if n % 2 or 0 in half]
    cuts = [np.arange(n // 2)]
    if topology.num_nodes <= _SOME_CUTS:
        weights = np.zeros((topology.num_nodes, topology.num_nodes))
        np.add.at(weights, (topology.links.src, topology.links.dst), topology.links.bandwidth_Bps)
        weights = weights + weights.T
        _, vectors = np.linalg.eigh(np.diag(weights.sum(axis=0)) - weights)
        cuts.append(np.argsort(vectors[:n, 1], kind="stable")[: n // 2])
    return cuts


def _flow(topology: Topology, low: Ints) -> float:
    """Returns the maximum flow from the ranks `low` to all other ranks, by Dinic's algorithm
    (1970)."""
    n = topology.num_nodes
    side = np.zeros(topology.num_ranks, dtype=bool)
    side[low] = True
    # The ranks `low` are merged into node 0, the other ranks into node 1. The switches follow from
    # node 2 on.
    name = np.concatenate([np.where(side, 0, 1), np.arange(n - topology.num_ranks) + 2])
    residual: dict[int, dict[int, float]] = {int(node): {} for node in name}
    links = topology.links
    ends = zip(name[links.src].tolist(), name[links.dst].tolist(), links.bandwidth_Bps, strict=True)
    for one, two, rate in ends:
        if one != two:
            residual[one][two] = residual[one].get(two, 0.0) + float(rate)
            residual[two].setdefault(one, 0.0)
    total, least = 0.0, 1e-9 * float(links.bandwidth_Bps.max(initial=0))
    while (level := _levels(residual, least)).get(1) is not None:
        while (amount := _augment(residual, level, least)) > least:
            total += amount
    return total


def _levels(residual: dict[int, dict[int, float]], least: float) -> dict[int, int]:
    level, queue = {0: 0}, deque([0])
    while queue:
        node = queue.popleft()
        for after, left in residual[node].items():
            if left > least and after not in level:
                level[after] = level[node] + 1
                queue.append(after)
    return level


def _augment(residual: dict[int, dict[int, float]], level: dict[int, int], least: float) -> float:
    """Adds flow along one path from node 0 to node 1 on which the level increases by 1 per link."""
    path, dead = [0], set[int]()
    while path and path[-1] != 1:
        node = path[-1]
        for after, left in residual[node].items():
            if left > least and after not in dead and level.get(after) == level[node] + 1:
                path.append(after)
                break
        else:
            dead.add(path.pop())
    steps = list(pairwise(path))
    if not steps:
        return 0.0
    amount = min(residual[one][two] for one, two in steps)
    for one, two in steps:
        residual[one][two] -= amount
        residual[two][one] += amount
    return amount

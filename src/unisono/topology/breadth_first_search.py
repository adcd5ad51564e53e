"""Breadth-first search from many nodes at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from unisono.topology.ragged_lists import Ints, Ragged, starts_of, take

if TYPE_CHECKING:
    from unisono.topology.graph import Topology

UNREACHABLE = -1
"""Distance of an unreachable node."""


def hops_from(topology: Topology, sources: Ints) -> NDArray[np.int32]:
    """Returns the number of links on the shortest path from each source to each node, as [sources,
    nodes]."""
    links = topology.links
    return _search(topology, topology.out, links.dst, sources)


def hops_to(topology: Topology, targets: Ints) -> NDArray[np.int32]:
    """Returns the number of links on the shortest path from each node to each target, as [targets,
    nodes]."""
    links = topology.links
    order = np.argsort(links.dst, kind="stable")
    into = order, starts_of(np.bincount(links.dst, minlength=topology.num_nodes))
    return _search(topology, into, links.src, targets)


def _search(topology: Topology, edges: Ragged, ends: Ints, sources: Ints) -> NDArray[np.int32]:
    n = topology.num_nodes
    hops = np.full((len(sources), n), UNREACHABLE, dtype=np.int32)
    flat = hops.reshape(-1)
    frontier = np.arange(len(sources)) * n + sources
    flat[frontier] = 0
    depth = 0
    while len(frontier):
        depth += 1
        links, starts = take(edges, frontier % n)
        cells = np.repeat(frontier // n * n, np.diff(starts)) + ends[links]
        cells = cells[flat[cells] == UNREACHABLE]
        flat[cells] = depth
        # Several links can lead to one node, so remove duplicates.
        frontier = np.unique(cells)
        if not topology.relays:
            frontier = frontier[frontier % n >= topology.num_ranks]
    return hops

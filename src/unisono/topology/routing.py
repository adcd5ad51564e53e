"""Routing, the choice of links for a message: the interface, shortest paths, and explicit paths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from unisono.topology.breadth_first_search import hops_to
from unisono.topology.ragged_lists import (
    Floats,
    Ints,
    Ragged,
    counting,
    ints,
    pick,
    starts_of,
    take,
)

if TYPE_CHECKING:
    from unisono.topology.graph import Topology

_CELLS = 1 << 24
"""Maximum number of distances in memory at the same time."""


class Routing(ABC):
    """Interface of a network's routing, and of other properties of the network's structure. Has no
    state.

    Subclasses are frozen dataclasses of numbers and tuples, so that files can store them.
    """

    @abstractmethod
    def routes(self, topology: Topology, src: Ints, dst: Ints, seed: int) -> Ragged:
        """Returns the links of the path of each pair of ranks, like `Topology.routes`."""

    def distance_counts(self, topology: Topology) -> Floats | None:
        """Returns the number of ordered pairs of ranks at each distance, or None if no formula is
        known."""
        return None

    def representatives(self, topology: Topology) -> tuple[Ints, Floats] | None:
        """Returns ranks that represent all ranks, and the number of ranks that each of them
        represents.

        A rank and its representative have equal numbers of ranks at each distance. Returns None if
        representatives are unknown.
        """
        return None

    def bisection_sides(self, topology: Topology) -> Ints | None:
        """Returns the side of each node, 0 or 1, in the cut through the middle, or None if this cut
        is unknown.

        A node of side -1 is assigned to the side that makes the cut smaller.
        """
        return None


@dataclass(frozen=True, slots=True)
class Shortest(Routing):
    """Routing along shortest paths, found by breadth-first search.

    Among the next links of shortest paths, the fastest link is taken (NVLink before PCIe). Among
    equally fast links, a hash chooses.
    """

    def routes(self, topology: Topology, src: Ints, dst: Ints, seed: int) -> Ragged:
        """Implements `Topology.routes`."""
        return shortest(topology, src, dst, seed)


def shortest(topology: Topology, src: Ints, dst: Ints, seed: int) -> Ragged:
    """Returns shortest paths between nodes of any kind, not only ranks."""
    targets, target_of = np.unique(dst, return_inverse=True)
    step = max(1, _CELLS // topology.num_nodes)
    counts = np.zeros(len(src), dtype=np.int64)
    found: list[tuple[Ints, Ints, Ints]] = []
    for first in range(0, len(targets), step):
        hops = hops_to(topology, targets[first : first + step])
        mine = np.flatnonzero((target_of >= first) & (target_of < first + step))
        left = hops[target_of[mine] - first, src[mine]].astype(np.int64)
        if (left < 0).any():
            bad = mine[np.argmin(left)]
            raise ValueError(f"{topology.name}: no path from node {src[bad]} to node {dst[bad]}")
        counts[mine] = left
        found += _walk(topology, hops, src[mine], dst[mine], mine, target_of[mine] - first, seed)
    starts = starts_of(counts)
    links = np.empty(starts[-1], dtype=np.int64)
    for pair, hop, link in found:
        links[starts[pair] + hop] = link
    return links, starts


def _walk(
    topology: Topology,
    hops: NDArray[np.int32],
    src: Ints,
    dst: Ints,
    pairs: Ints,
    targets: Ints,
    seed: int,
) -> list[tuple[Ints, Ints, Ints]]:
    """Returns the links of all paths as (pairs, hop numbers, links), one entry per hop."""
    here, hop = src.copy(), 0
    found: list[tuple[Ints, Ints, Ints]] = []
    while True:
        go = np.flatnonzero(here != dst)
        if not len(go):
            return found
        links, starts = take(topology.out, here[go])
        owner = np.repeat(np.arange(len(go)), np.diff(starts))
        after = hops[targets[go][owner], topology.links.dst[links]]
        closer = after == hops[targets[go], here[go]][owner] - 1
        if not topology.relays:
            ends = topology.links.dst[links]
            closer &= (ends >= topology.num_ranks) | (ends == dst[go][owner])
        links, owner = links[closer], owner[closer]
        rate = topology.links.bandwidth_Bps[links]
        best = np.zeros(len(go))
        np.maximum.at(best, owner, rate)
        links, owner = links[rate == best[owner]], owner[rate == best[owner]]
        choices = np.bincount(owner, minlength=len(go))
        chosen = pick(choices, src[go], dst[go], seed, hop)
        link = links[starts_of(choices)[:-1] + chosen]
        found.append((pairs[go], np.full(len(go), hop), link))
        here[go] = topology.links.dst[link]
        hop += 1


@dataclass(frozen=True, slots=True)
class Explicit(Routing):
    """Routing along explicit paths between some pairs of ranks. The routing `base` finds all other
    paths.

    `pairs[i]` is src * num_ranks + dst of `paths[i]`, in ascending order. If a pair has several
    paths, a hash chooses.
    """

    base: Routing
    pairs: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]

    def routes(self, topology: Topology, src: Ints, dst: Ints, seed: int) -> Ragged:
        """Implements `Topology.routes`."""
        wanted = src * topology.num_ranks + dst
        pairs = ints(self.pairs)
        first = np.searchsorted(pairs, wanted, side="left")
        choices = np.searchsorted(pairs, wanted, side="right") - first
        given, rest = np.flatnonzero(choices), np.flatnonzero(choices == 0)
        counts = ints([len(path) for path in self.paths])
        values = ints([link for path in self.paths for link in path])
        chosen = first[given] + pick(choices[given], src[given], dst[given], seed)
        one = take((values, starts_of(counts)), chosen)
        other = self.base.routes(topology, src[rest], dst[rest], seed)
        both = np.concatenate([one[0], other[0]])
        lengths = np.concatenate([np.diff(one[1]), np.diff(other[1])])
        back = np.argsort(np.concatenate([given, rest]))
        return take((both, starts_of(lengths)), back)


def explicit(
    topology: Topology,
    routes: Mapping[tuple[int, int], Sequence[int] | Sequence[Sequence[int]]],
) -> Explicit:
    """Returns the routing of `Topology.with_routes`."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for (src, dst), given in routes.items():
        if not (0 <= src < topology.num_ranks and 0 <= dst < topology.num_ranks):
            raise ValueError(f"explicit path: unknown ranks {src}, {dst} of {topology.num_ranks}")
        for path in _paths(given):
            _check_path(topology, src, dst, path)
            found.append((src * topology.num_ranks + dst, path))
    found.sort(key=lambda pair: pair[0])
    return Explicit(
        topology.routing, tuple(number for number, _ in found), tuple(path for _, path in found)
    )


def _paths(given: Sequence[int] | Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    if all(isinstance(item, int | np.integer) for item in given):
        return [tuple(int(link) for link in given)]  # type: ignore[arg-type]
    return [tuple(int(link) for link in path) for path in given]  # type: ignore[union-attr]


def _check_path(topology: Topology, src: int, dst: int, path: tuple[int, ...]) -> None:
    here = src
    for link in path:
        if not 0 <= link < len(topology.links) or topology.links.src[link] != here:
            raise ValueError(
                f"explicit path {src} to {dst}: link {link} does not start at node {here}"
            )
        here = int(topology.links.dst[link])
    if here != dst:
        raise ValueError(f"explicit path {src} to {dst} ends at node {here}")


def along(topology: Topology, stops: Ints, src: Ints, dst: Ints, seed: int) -> Ragged:
    """Returns the links of the path through the nodes of each row of `stops`. Repeated nodes are
    skipped."""
    moves = stops[:, 1:] != stops[:, :-1]
    row = np.nonzero(moves)[0]
    counts = moves.sum(axis=1)
    hop = counting(counts)
    links = topology.link_ids(
        stops[:, :-1][moves], stops[:, 1:][moves], src[row], dst[row], seed, hop
    )
    return links, starts_of(counts)

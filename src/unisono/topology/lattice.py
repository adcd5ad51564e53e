"""Rings, lines, grids, tori, hypercubes and complete networks. Except in complete networks, ranks
are the points of a box, numbered along axis 0 first.

Source: Dally and Towles, "Principles and Practices of Interconnection Networks" (2004), chapters 3,
5 and 8 (dimension-order routing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import TYPE_CHECKING

import numpy as np

from unisono.topology.graph import Topology
from unisono.topology.ragged_lists import Floats, Ints, Ragged, counting, ints, join, starts_of
from unisono.topology.routing import Routing
from unisono.topology.wiring import NETWORK, NVLINK, Cable, Wiring

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Lattice(Routing):
    """A box of ranks with `sizes[a]` ranks along axis a. The lines along axis a are rings if
    `wraps[a]`.

    Messages go along axis 0 first, and in the shorter direction around a ring. If both directions
    are equally long, messages from even coordinates go up and messages from odd coordinates go
    down.
    """

    sizes: tuple[int, ...]
    wraps: tuple[bool, ...]

    def routes(self, topology: Topology, src: Ints, dst: Ints, seed: int) -> Ragged:
        """Implements `Topology.routes`."""
        parts = []
        here = src
        for stride, size, wrap in self._axes():
            at, target = here // stride % size, dst // stride % size
            offset = target - at
            if wrap:
                up = offset % size
                direction = np.where(
                    2 * up == size, 1 - 2 * (at % 2), np.where(2 * up < size, 1, -1)
                )
                count = np.where(direction > 0, up, (size - up) % size)
            else:
                direction, count = np.sign(offset), np.abs(offset)
            row = np.repeat(np.arange(len(src)), count)
            place = at[row] + counting(count) * direction[row]
            base = (here - at * stride)[row]
            one = base + place % size * stride
            two = base + (place + direction[row]) % size * stride
            parts.append((topology.link_ids(one, two), starts_of(count)))
            here = here + offset * stride
        return join(parts)

    def distance_counts(self, topology: Topology) -> Floats:
        """Returns the number of ordered pairs of ranks at each distance, as the convolution of the
        numbers along each axis. A distance is the sum of the distances along the axes."""
        counts = np.ones(1)
        for _, size, wrap in self._axes():
            one, two = np.meshgrid(np.arange(size), np.arange(size))
            distance = np.abs(one - two)
            counts = np.convolve(
                counts,
                np.bincount((np.minimum(distance, size - distance) if wrap else distance).ravel()),
            )
        return counts.astype(np.float64)

    def representatives(self, topology: Topology) -> tuple[Ints, Floats] | None:
        """Returns rank 0, which represents all ranks of a torus. Returns None for other boxes."""
        if not all(closed or size <= 2 for _, size, closed in self._axes()):
            return None
        return np.zeros(1, dtype=np.int64), np.full(1, float(topology.num_ranks))

    def bisection_sides(self, topology: Topology) -> Ints:
        """Returns the cut through the middle of the axis with the fewest links to cut. Among equal
        axes, prefers an axis of even length."""

        def links(axis: tuple[int, int, bool]) -> tuple[float, bool]:
            _, size, closed = axis
            return ((2 if closed else 1) / size if size > 1 else inf), size % 2 == 1

        stride, size, _ = min(self._axes(), key=links)
        return (np.arange(topology.num_ranks) // stride % size >= size // 2).astype(np.int64)

    def _axes(self) -> Iterator[tuple[int, int, bool]]:
        """Yields (stride, size, true if it is a ring) of each axis."""
        stride = 1
        for size, wrap in zip(self.sizes, self.wraps, strict=True):
            yield stride, size, wrap and size > 2
            stride *= size


@dataclass(frozen=True, slots=True)
class Complete(Routing):
    """A network with a link between every two ranks."""

    def routes(self, topology: Topology, src: Ints, dst: Ints, seed: int) -> Ragged:
        """Implements `Topology.routes`."""
        go = src != dst
        return topology.link_ids(src[go], dst[go]), starts_of(go.astype(np.int64))

    def distance_counts(self, topology: Topology) -> Floats:
        """Returns the number of ordered pairs of ranks at each distance: all pairs of different
        ranks have a distance of one link."""
        n = topology.num_ranks
        return np.array([n, n * (n - 1)] if n > 1 else [n], dtype=np.float64)

    def representatives(self, topology: Topology) -> tuple[Ints, Floats]:
        """Returns one representative rank for all ranks."""
        return np.zeros(1, dtype=np.int64), np.full(1, float(topology.num_ranks))

    def bisection_sides(self, topology: Topology) -> Ints:
        """Returns the cut between the lower and the upper half of the ranks."""
        return (np.arange(topology.num_ranks) >= topology.num_ranks // 2).astype(np.int64)


def torus(sizes: Sequence[int], *, cable: Cable = NETWORK) -> Topology:
    """Builds a torus of any number of dimensions. An axis of size 2 has one link, not two.

    >>> torus([4, 4, 4]).diameter()
    6
    """
    return _lattice("torus", sizes, True, cable)


def grid(sizes: Sequence[int], *, cable: Cable = NETWORK) -> Topology:
    """Builds a grid: a torus without the links that close the rings.

    >>> grid([4, 4]).diameter()
    6
    """
    return _lattice("grid", sizes, False, cable)


def ring(ranks: int, *, cable: Cable = NETWORK) -> Topology:
    """Builds a ring.

    >>> ring(8).num_links, ring(8).diameter()
    (8, 4)
    """
    return _lattice("ring", [ranks], True, cable)


def line(ranks: int, *, cable: Cable = NETWORK) -> Topology:
    """Builds a line: a ring without the link that closes it.

    >>> line(8).diameter()
    7
    """
    return _lattice("line", [ranks], False, cable)


def hypercube(dims: int, *, cable: Cable = NETWORK) -> Topology:
    """Builds a hypercube of 2 ** dims ranks. Ranks whose numbers differ in one bit have a link.

    Raises `ValueError` for more than 24 dimensions.

    >>> hypercube(3).num_ranks, hypercube(3).num_links
    (8, 12)
    """
    if not 0 <= dims <= 24:
        raise ValueError(f"hypercube: expected 0 to 24 dimensions, got {dims}")
    return _lattice("hypercube", [2] * dims, False, cable, label=str(dims))


def mesh(ranks: int, *, cable: Cable = NVLINK) -> Topology:
    """Builds a complete network, with a link between every two ranks.

    >>> mesh(8).num_links, mesh(8).diameter()
    (28, 1)
    """
    _check_sizes("mesh", [ranks])
    wiring = Wiring(num_ranks=ranks)
    one, other = np.triu_indices(ranks, 1)
    wiring.join(ints(one), ints(other), cable)
    return wiring.build(f"mesh:{ranks}", Complete(), relays=True)


def _lattice(
    name: str, sizes: Sequence[int], wrap: bool, cable: Cable, label: str = ""
) -> Topology:
    _check_sizes(name, sizes)
    wiring = Wiring(num_ranks=prod(sizes))
    rank = np.arange(wiring.num_ranks)
    stride = 1
    for size in sizes:
        at = rank // stride % size
        # On an axis with two ranks, the two directions of a ring are the same link, so add it once.
        start = rank[at < (size if wrap and size > 2 else size - 1)]
        at = start // stride % size
        wiring.join(start, start + ((at + 1) % size - at) * stride, cable)
        stride *= size
    shape = Lattice(tuple(sizes), (wrap,) * len(sizes)) if sizes else Lattice((1,), (False,))
    return wiring.build(f"{name}:{label or 'x'.join(map(str, sizes))}", shape, relays=True)


def _check_sizes(name: str, sizes: Sequence[int]) -> None:
    if any(size < 1 for size in sizes):
        raise ValueError(f"{name}: expected sizes of at least 1, got {'x'.join(map(str, sizes))}")

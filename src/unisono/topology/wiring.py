"""Builds topologies from nodes and cables, many at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from unisono.topology.graph import LinkKind, Links, NodeKind, Nodes, Topology
from unisono.topology.ragged_lists import Ints, ints
from unisono.topology.routing import Routing

GBPS = 1e9 / 8
"""Bytes per second of 1 Gbit/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """Properties of a pair of links, equal in both directions."""

    bandwidth_Bps: float
    latency_s: float
    kind: LinkKind

    def __post_init__(self) -> None:
        if not (self.bandwidth_Bps > 0 and self.latency_s >= 0):
            raise ValueError(
                f"expected a bandwidth > 0 and a latency >= 0, got {self.bandwidth_Bps:g}, "
                f"{self.latency_s:g}"
            )

    def times(self, factor: float) -> Cable:
        """Returns a cable with `factor` times the bandwidth."""
        return Cable(
            bandwidth_Bps=self.bandwidth_Bps * factor, latency_s=self.latency_s, kind=self.kind
        )


NETWORK = Cable(bandwidth_Bps=400 * GBPS, latency_s=500e-9, kind=LinkKind.INFINIBAND)
"""A link of 400 Gbit/s, as in NDR InfiniBand, with a latency of half a microsecond."""
NVLINK = Cable(bandwidth_Bps=450e9, latency_s=200e-9, kind=LinkKind.NVLINK)
"""All 18 NVLinks of an H100 together, in one direction."""
PCIE = Cable(bandwidth_Bps=63e9, latency_s=150e-9, kind=LinkKind.PCIE)
"""PCIe of generation 5 with 16 lanes, in one direction."""
SOCKETS = Cable(bandwidth_Bps=60e9, latency_s=100e-9, kind=LinkKind.INTER_SOCKET)
"""Three UPI links at 16 GT/s, in one direction."""


@dataclass(slots=True, kw_only=True)
class Wiring:
    """A network under construction."""

    num_ranks: int
    kinds: list[Ints] = field(default_factory=list)
    reduces: list[Ints] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    ends: list[tuple[Ints, Ints, Cable]] = field(default_factory=list)
    _count: int = 0

    def add(self, count: int, kind: NodeKind = NodeKind.SWITCH, *, reduces: bool = False) -> Ints:
        """Adds `count` nodes. Returns their numbers."""
        first = self.num_ranks + self._count
        self._count += count
        self.kinds.append(np.full(count, kind))
        self.reduces.append(np.full(count, int(reduces)))
        return np.arange(first, first + count)

    def join(self, one: Ints, other: Ints, cable: Cable) -> None:
        """Adds a cable between each node in `one` and the node at the same index in `other`. The
        arrays are broadcast as in NumPy."""
        ends = np.broadcast_arrays(ints(one), ints(other))
        self.ends.append((ends[0].ravel(), ends[1].ravel(), cable))

    def build(self, name: str, routing: Routing, *, relays: bool = False) -> Topology:
        """Builds the topology. Link 2i + 1 is the reverse of link 2i."""
        zero = np.zeros(0, dtype=np.int64)
        one = np.concatenate([zero, *(a for a, _, _ in self.ends)])
        other = np.concatenate([zero, *(b for _, b, _ in self.ends)])
        counts = [len(a) for a, _, _ in self.ends]

        def column(values: list[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            return np.repeat(np.asarray(values, dtype=np.float64), 2 * ints(counts))

        cables = [cable for _, _, cable in self.ends]
        ranks = np.full(self.num_ranks, int(NodeKind.RANK))
        return Topology(
            name=name,
            num_ranks=self.num_ranks,
            nodes=Nodes(
                kind=np.concatenate([ranks, *self.kinds]).astype(np.int8),
                reduces=np.concatenate([ranks, *self.reduces]).astype(bool),
                names=tuple(self.names),
            ),
            links=Links(
                src=np.stack([one, other], axis=1).ravel(),
                dst=np.stack([other, one], axis=1).ravel(),
                bandwidth_Bps=column([cable.bandwidth_Bps for cable in cables]),
                latency_s=column([cable.latency_s for cable in cables]),
                kind=column([float(cable.kind) for cable in cables]).astype(np.int8),
            ),
            routing=routing,
            relays=relays,
        )


def check_counts(name: str, **counts: int) -> None:
    """Raises `ValueError` for a count below 1."""
    for what, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}: expected {what} of at least 1, got {count}")

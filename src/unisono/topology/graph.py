"""A network: ranks, switches, and directed links between them, as columns.

Nodes are numbered. Node r < num_ranks is rank r. All other nodes forward messages: switches of any
kind, network cards, and the sockets of a server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from unisono.topology.ragged_lists import Floats, Ints, Ragged, ints, pick, starts_of

if TYPE_CHECKING:
    from unisono.topology.routing import Routing


class LinkKind(IntEnum):
    """Technology of a link."""

    OTHER = 0
    SHARED_MEMORY = 1
    NVLINK = 2
    PCIE = 3
    CXL = 4
    INTER_SOCKET = 5
    """UPI, Infinity Fabric and similar links between the sockets of a server."""
    ETHERNET = 6
    ROCE = 7
    INFINIBAND = 8


class NodeKind(IntEnum):
    """Kind of a node."""

    RANK = 0
    SWITCH = 1
    NVSWITCH = 2
    PCIE_SWITCH = 3
    SOCKET = 4
    NIC = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nodes:
    """Properties of nodes, as columns with a row for each node.

    - `kind`: values of `NodeKind`.
    - `reduces`: true if the node can reduce the messages that pass (SHARP, NVLS).
    - `names`: the name of each node, or empty.
    """

    kind: NDArray[np.int8]
    reduces: NDArray[np.bool_]
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.kind)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Nodes) and _same(self, other)

    def __hash__(self) -> int:
        return hash((len(self), self.names[:1]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Links:
    """Directed links from node `src` to node `dst`, as columns with a row for each link.

    `bandwidth_Bps` is in bytes per second, `latency_s` in seconds. `kind` has values of `LinkKind`.
    A cable has two links, one for each direction.
    """

    src: Ints
    dst: Ints
    bandwidth_Bps: Floats
    latency_s: Floats
    kind: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.src)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Links) and _same(self, other)

    def __hash__(self) -> int:
        return hash((len(self), self.src[:8].tobytes(), self.dst[:8].tobytes()))


@dataclass(frozen=True, kw_only=True)
class Topology:
    """An immutable network with its routing. Its arrays are read-only.

    `relays` is true if ranks forward messages of other ranks, as in a ring or a torus. Raises
    `ValueError` if a link's node does not exist, or if a rate is not positive.

    >>> from unisono import topology
    >>> torus = topology.torus([4, 4])
    >>> torus.num_ranks, torus.num_links, torus.diameter(), round(torus.mean_distance(), 3)
    (16, 32, 4, 2.133)
    """

    name: str
    num_ranks: int
    nodes: Nodes
    links: Links
    routing: Routing
    relays: bool = True

    def __post_init__(self) -> None:
        for table in (self.nodes, self.links):
            for field in fields(table):
                column = getattr(table, field.name)
                if isinstance(column, np.ndarray):
                    column.flags.writeable = False
        _check(self)

    def __repr__(self) -> str:
        return f"<Topology {self.name}: {self.num_ranks} ranks, {self.num_links} links>"

    @property
    def num_nodes(self) -> int:
        """Number of ranks and other nodes."""
        return len(self.nodes)

    @cached_property
    def num_links(self) -> int:
        """Number of cables. A link and its reverse link count as one cable; `len(topology.links)`
        counts directed links.
        """
        n = self.num_nodes
        keys, counts = np.unique(self.links.src * n + self.links.dst, return_counts=True)
        back = keys % n * n + keys // n
        place = np.minimum(np.searchsorted(keys, back), max(len(keys) - 1, 0))
        counts_back = np.where(keys[place] == back, counts[place], 0) if len(keys) else counts
        # A link with a reverse link counts half, because its cable occurs in both directions.
        share = np.where(counts_back > 0, 0.5, 1.0)
        return round(float((np.maximum(counts, counts_back) * share).sum()))

    def routes(self, src: Ints, dst: Ints, *, seed: int = 0) -> Ragged:
        """Returns the path from each rank in `src` to the rank at the same index in `dst`.

        The result is (links, starts). Path i is links[starts[i]:starts[i + 1]], the link ids in
        their order on the path. The path from a rank to itself is empty. Among equally good paths,
        a hash of source, destination and seed chooses. Raises `ValueError` for unknown or
        unreachable ranks.

        >>> from unisono import topology
        >>> ring = topology.ring(6)
        >>> links, starts = ring.routes([0, 4], [2, 4])
        >>> ring.links.dst[links].tolist(), starts.tolist()
        ([1, 2], [0, 2, 2])
        """
        src, dst = np.atleast_1d(ints(src)), np.atleast_1d(ints(dst))
        if src.shape != dst.shape or src.ndim != 1:
            raise ValueError(
                f"routes: expected equal counts, got {src.shape} sources, {dst.shape} destinations"
            )
        for ranks in (src, dst):
            if len(ranks) and not 0 <= ranks.min() <= ranks.max() < self.num_ranks:
                wrong = ranks[(ranks < 0) | (ranks >= self.num_ranks)][0]
                raise ValueError(f"routes: expected ranks in 0..{self.num_ranks - 1}, got {wrong}")
        return self.routing.routes(self, src, dst, seed)

    def route(self, src: int, dst: int, *, seed: int = 0) -> list[int]:
        """Returns the link ids of the path from rank `src` to rank `dst`; see `routes`."""
        links, _ = self.routes(ints([src]), ints([dst]), seed=seed)
        return [int(link) for link in links]

    def link_ids(self, src: Ints, dst: Ints, *words: Ints | int) -> Ints:
        """Returns the id of the link from each node in `src` to the node at the same index in
        `dst`.

        Among parallel links, a hash of `words` chooses. Raises `ValueError` if two nodes have no
        link.
        """
        keys, order, starts = self._pairs
        wanted = src * self.num_nodes + dst
        place = np.searchsorted(keys, wanted)
        found = place < len(keys)
        found[found] = keys[place[found]] == wanted[found]
        if not found.all():
            bad = int(np.argmin(found))
            raise ValueError(f"{self.name}: no link from node {src[bad]} to node {dst[bad]}")
        first = starts[place]
        if len(keys) < len(order):
            first = first + pick(starts[place + 1] - first, *words)
        return ints(order[first])

    @cached_property
    def _pairs(self) -> tuple[Ints, Ints, Ints]:
        """Pairs of connected nodes in ascending order, link ids sorted by pair, and the start of
        each pair's ids."""
        keys = self.links.src * self.num_nodes + self.links.dst
        order = np.argsort(keys, kind="stable")
        found, counts = np.unique(keys, return_counts=True)
        return found, order, starts_of(counts)

    @cached_property
    def out(self) -> Ragged:
        """Ids of the links that leave each node, as (values, starts)."""
        order = np.argsort(self.links.src, kind="stable")
        return order, starts_of(np.bincount(self.links.src, minlength=self.num_nodes))

    def diameter(self) -> int:
        """Returns the largest number of links on a shortest path between two ranks."""
        from unisono.topology.distance_and_bisection import distance_counts

        counts = distance_counts(self)
        return len(counts) - 1

    def mean_distance(self) -> float:
        """Returns the mean number of links on the shortest path between two different ranks."""
        from unisono.topology.distance_and_bisection import distance_counts

        counts = distance_counts(self)
        pairs = float(counts[1:].sum())
        return float(counts @ np.arange(len(counts))) / pairs if pairs else 0.0

    def bisection_Bps(self) -> float:
        """Returns the bytes per second that one half of the ranks can send to the other half.

        For a known kind of network, the cut goes through the middle, as in textbooks. If the number
        of rows, leaves or groups is odd, one side has one more. For other networks with up to 12
        ranks, the result is the minimum over all cuts. With more ranks, it is the minimum over some
        cuts (see `measure`).
        """
        from unisono.topology.distance_and_bisection import bisection

        return bisection(self)

    def with_links(
        self,
        *,
        bandwidth_Bps: Floats | float | None = None,
        latency_s: Floats | float | None = None,
    ) -> Topology:
        """Returns the network with other rates or latencies. A number is for all links, an array
        has one number per link."""
        links = self.links
        rate = links.bandwidth_Bps if bandwidth_Bps is None else _column(bandwidth_Bps, len(links))
        wait = links.latency_s if latency_s is None else _column(latency_s, len(links))
        return replace(self, links=replace(links, bandwidth_Bps=rate, latency_s=wait))

    def without(self, failed: Sequence[int]) -> Topology:
        """Returns the network without these links, with new link ids and new paths."""
        from unisono.topology.routing import Shortest

        keep = np.ones(len(self.links), dtype=bool)
        keep[ints(list(failed))] = False
        links = Links(**{f.name: getattr(self.links, f.name)[keep] for f in fields(Links)})
        return replace(self, name=f"{self.name} degraded", links=links, routing=Shortest())

    def with_routes(
        self, routes: Mapping[tuple[int, int], Sequence[int] | Sequence[Sequence[int]]]
    ) -> Topology:
        """Returns the network with explicit paths between some ranks.

        `routes` maps (source, destination) to a list of link ids, or to several such lists, among
        which a hash chooses. Raises `ValueError` for a list that is not a path between the two
        ranks.
        """
        from unisono.topology.routing import explicit

        return replace(self, routing=explicit(self, routes))


def _column(values: Floats | float, rows: int) -> Floats:
    return np.broadcast_to(np.asarray(values, dtype=np.float64), rows).copy()


def _same(one: object, other: object) -> bool:
    pairs = ((getattr(one, f.name), getattr(other, f.name)) for f in fields(one))  # type: ignore[arg-type]
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def _check(topology: Topology) -> None:
    links, nodes = topology.links, topology.nodes
    lengths = {len(getattr(links, field.name)) for field in fields(links)}
    if len(lengths) > 1 or len(nodes.reduces) != len(nodes):
        raise ValueError(f"{topology.name}: expected columns of one length")
    if topology.num_ranks < 1:
        raise ValueError(f"{topology.name}: expected at least 1 rank")
    is_rank = nodes.kind == NodeKind.RANK
    if is_rank.sum() != topology.num_ranks or not is_rank[: topology.num_ranks].all():
        raise ValueError(
            f"{topology.name}: expected ranks as the first {topology.num_ranks} nodes only"
        )
    if nodes.names and len(nodes.names) != len(nodes):
        raise ValueError(f"{topology.name}: expected {len(nodes)} names, got {len(nodes.names)}")
    if not len(links):
        return
    ends = np.concatenate([links.src, links.dst])
    if ends.min() < 0 or ends.max() >= len(nodes):
        raise ValueError(f"{topology.name}: a link ends at an unknown node")
    if (links.src == links.dst).any():
        raise ValueError(f"{topology.name}: a link connects a node to itself")
    if not (links.bandwidth_Bps > 0).all() or not (links.latency_s >= 0).all():
        raise ValueError(f"{topology.name}: expected bandwidths > 0 and latencies >= 0")
    if not np.isfinite(links.bandwidth_Bps).all() or not np.isfinite(links.latency_s).all():
        raise ValueError(f"{topology.name}: expected finite bandwidths and latencies")

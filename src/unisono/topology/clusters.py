"""Clusters: topologies that combine the topology of a server with the network between servers."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from unisono.topology.breadth_first_search import hops_from
from unisono.topology.clos import Clos, rails
from unisono.topology.graph import Links, NodeKind, Nodes, Topology
from unisono.topology.ragged_lists import Floats, Ints, Ragged, ints, join, spread, take
from unisono.topology.routing import Routing, shortest
from unisono.topology.servers import dgx
from unisono.topology.wiring import NETWORK, Cable


@dataclass(frozen=True, slots=True)
class JoinedServers(Routing):
    """Copies of the topology `server`. The network cards of the copies are the endpoints of the
    network `fabric`.

    `ports` are the nodes of a server's network cards. Rank r is rank r % g of server r // g, with g
    ranks per server. Endpoint e of the fabric is `ports[e % len(ports)]` of server e // len(ports).
    Rank l of a server sends through `ports[exits[l]]`. Nodes are numbered: ranks, other nodes of
    each server, switches of the fabric. Links are numbered: links of each server, then links of the
    fabric.
    """

    server: Topology
    fabric: Topology
    ports: tuple[int, ...]
    exits: tuple[int, ...]

    @property
    def hosts(self) -> int:
        """Number of servers."""
        return self.fabric.num_ranks // len(self.ports)

    def routes(self, topology: Topology, src: Ints, dst: Ints, seed: int) -> Ragged:
        """Implements `Topology.routes`."""
        size, inner = self.server.num_ranks, len(self.server.links)
        (host, local), (to_host, to_local) = np.divmod(src, size), np.divmod(dst, size)
        inside, across = np.flatnonzero(host == to_host), np.flatnonzero(host != to_host)
        local_routes = self.server.routing.routes(
            self.server, local[inside], to_local[inside], seed
        )
        parts = [_moved(spread(local_routes, inside, len(src)), host * inner)]
        ranks, exits, ports = np.arange(size), ints(self.exits), ints(self.ports)
        out = shortest(self.server, ranks, ports[exits], seed)
        into = shortest(self.server, ports[exits], ranks, seed)
        one = host * len(ports) + exits[local]
        two = to_host * len(ports) + exits[to_local]
        between = self.fabric.routing.routes(self.fabric, one[across], two[across], seed)
        parts.append(_moved(spread(take(out, local[across]), across, len(src)), host * inner))
        parts.append(
            _moved(spread(between, across, len(src)), np.full(len(src), self.hosts * inner))
        )
        parts.append(
            _moved(spread(take(into, to_local[across]), across, len(src)), to_host * inner)
        )
        return join(parts)

    def representatives(self, topology: Topology) -> tuple[Ints, Floats] | None:
        """Returns the ranks of a few servers. They represent all ranks, because the network cards
        of these servers represent all cards in the fabric."""
        count, shape = len(self.ports), self.fabric.routing
        found = shape.representatives(self.fabric)
        even = isinstance(shape, Clos) and (shape.hosts % count == 0 or shape.rails == count)
        if found is None or (count > 1 and not even):
            return None
        size = self.server.num_ranks
        first = found[0] // count * size
        ranks = (first[:, None] + np.arange(size)).ravel()
        return ranks, np.repeat(found[1] / count, size)

    def bisection_sides(self, topology: Topology) -> Ints | None:
        """Returns the bisection of the fabric, or None if the bisection divides a server."""
        side = self.fabric.routing.bisection_sides(self.fabric)
        if side is None:
            return None
        ends = side[: self.fabric.num_ranks].reshape(self.hosts, len(self.ports))
        if (ends != ends[:, :1]).any():
            return None
        rest = self.server.num_nodes - self.server.num_ranks
        of_host = ends[:, 0]
        return np.concatenate(
            [
                np.repeat(of_host, self.server.num_ranks),
                np.repeat(of_host, rest),
                side[self.fabric.num_ranks :],
            ]
        )


def cluster(server: Topology, fabric: Topology) -> Topology:
    """Builds a network of identical servers. The endpoints of the fabric become the servers'
    network cards.

    The cards are the server's nodes of kind NIC. Card i of server h is endpoint h * cards + i of
    the fabric. Raises `ValueError` for a server without cards, or if the number of endpoints is not
    a multiple of the cards.

    >>> from unisono import topology
    >>> pod = cluster(topology.dgx(8), topology.fat_tree(8))
    >>> pod.num_ranks, pod.diameter()
    (128, 10)
    """
    ports = np.flatnonzero(server.nodes.kind == NodeKind.NIC)
    if not len(ports):
        raise ValueError(f"cluster: {server.name} has no network cards")
    if fabric.num_ranks % len(ports):
        raise ValueError(
            f"cluster: expected a multiple of "
            f"{len(ports)} endpoints, got {fabric.num_ranks} in {fabric.name}"
        )
    shape = JoinedServers(server, fabric, tuple(ports.tolist()), _exits(server, ports))
    return Topology(
        name=f"{server.name}/{fabric.name}",
        num_ranks=shape.hosts * server.num_ranks,
        nodes=_nodes(shape),
        links=_links(shape),
        routing=shape,
        relays=False,
    )


def rail_optimised(
    *,
    hosts: int,
    gpus: int = 8,
    spines: int = 0,
    unit: int = 0,
    server: Topology | None = None,
    cable: Cable = NETWORK,
) -> Topology:
    """Builds a network of DGX-like servers. Card i of each server has a link to the leaf of rail i.

    Spines connect the leaves; `spines` 0 means full bisection bandwidth. Each group of `unit`
    servers has its own leaves; with 0, all servers form one group.

    >>> pod = rail_optimised(hosts=4, gpus=4)
    >>> len(pod.route(0, 4)), len(pod.route(0, 5))
    (6, 8)
    """
    server = dgx(gpus, per_switch=1 if gpus % 4 else 2) if server is None else server
    cards = int((server.nodes.kind == NodeKind.NIC).sum())
    fabric = rails(hosts=hosts, rails=max(cards, 1), spines=spines, unit=unit, cable=cable)
    return cluster(server, fabric)


def _exits(server: Topology, ports: Ints) -> tuple[int, ...]:
    """Returns the index of each rank's nearest network card. Ranks are distributed over equally
    near cards."""
    hops = hops_from(server, np.arange(server.num_ranks))[:, ports]
    used = np.zeros(len(ports), dtype=np.int64)
    exits = []
    for rank, row in enumerate(hops):
        if (row < 0).all():
            raise ValueError(f"cluster: {server.name}: rank {rank} cannot reach a network card")
        near = np.flatnonzero(row == row[row >= 0].min())
        port = int(near[np.argmin(used[near])])
        used[port] += 1
        exits.append(port)
    return tuple(exits)


def _moved(lists: Ragged, offset: Ints) -> Ragged:
    """Adds an offset to the link ids of each list."""
    values, starts = lists
    return values + np.repeat(offset, np.diff(starts)), starts


def _nodes(shape: JoinedServers) -> Nodes:
    server, fabric, hosts = shape.server, shape.fabric, shape.hosts

    def column(name: str) -> Ints:
        one, other = getattr(server.nodes, name), getattr(fabric.nodes, name)
        g = server.num_ranks
        parts = [np.tile(one[:g], hosts), np.tile(one[g:], hosts), other[fabric.num_ranks :]]
        return np.concatenate(parts)

    return Nodes(kind=column("kind").astype(np.int8), reduces=column("reduces").astype(bool))


def _links(shape: JoinedServers) -> Links:
    server, fabric, hosts = shape.server, shape.fabric, shape.hosts
    g, rest = server.num_ranks, server.num_nodes - server.num_ranks
    host = np.arange(hosts)[:, None]
    node = np.arange(server.num_nodes)[None, :]
    # Node of the cluster, by [server, node of the server].
    place = np.where(node < g, host * g + node, hosts * g + host * rest + node - g)
    ends = place[:, ints(shape.ports)].ravel()
    above = hosts * (g + rest) + np.arange(fabric.num_nodes - fabric.num_ranks)
    outer = np.concatenate([ends, above])
    columns = {}
    for field in fields(Links):
        one, other = getattr(server.links, field.name), getattr(fabric.links, field.name)
        if field.name in ("src", "dst"):
            columns[field.name] = np.concatenate([place[:, one].ravel(), outer[other]])
        else:
            columns[field.name] = np.concatenate([np.tile(one, hosts), other])
    return Links(**columns)

"""Converts topologies to and from networkx. networkx is imported when a function is called, not
when this module is imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.extras import with_cure
from unisono.topology.graph import LinkKind, Links, NodeKind, Nodes, Topology
from unisono.topology.ragged_lists import ints
from unisono.topology.routing import Shortest
from unisono.topology.wiring import NETWORK


def to_networkx(topology: Topology) -> Any:
    """Returns a topology as a `networkx.MultiDiGraph`.

    Nodes have the attributes kind, reduces and name. Edges have bandwidth_Bps, latency_s and kind;
    their keys are link ids. Kinds are names in lower case. A graph does not contain the routing, so
    `from_networkx` uses shortest paths. `to_json` keeps the routing. Raises `ImportError` if
    networkx (the extra `graph`) is missing.

    >>> from unisono import topology
    >>> graph = to_networkx(topology.star(3))
    >>> graph.number_of_nodes(), graph.nodes[0]["kind"]
    (4, 'rank')
    """
    try:
        import networkx
    except ModuleNotFoundError as error:
        raise with_cure(error, "to_networkx") from None

    graph = networkx.MultiDiGraph(name=topology.name, relays=topology.relays)
    nodes, links = topology.nodes, topology.links
    for node in range(topology.num_nodes):
        named = {"name": nodes.names[node]} if nodes.names else {}
        kind = NodeKind(nodes.kind[node]).name.lower()
        graph.add_node(node, kind=kind, reduces=bool(nodes.reduces[node]), **named)
    rows = zip(
        links.src.tolist(),
        links.dst.tolist(),
        links.bandwidth_Bps.tolist(),
        links.latency_s.tolist(),
        links.kind.tolist(),
        strict=True,
    )
    for link, (src, dst, rate, wait, kind) in enumerate(rows):
        name = LinkKind(kind).name.lower()
        graph.add_edge(src, dst, link, bandwidth_Bps=rate, latency_s=wait, kind=name)
    return graph


def from_networkx(graph: Any, *, name: str = "", relays: bool | None = None) -> Topology:
    """Reads any networkx graph as a topology.

    Nodes without a `kind` are ranks. Edges of an undirected graph are links in both directions.
    Missing rates and latencies are those of 400 Gbit/s InfiniBand. Messages take shortest paths;
    `Topology.with_routes` sets other paths. Ranks, then other nodes, are numbered in the order of
    the graph. Raises `ValueError` for unknown kinds.

    >>> import networkx
    >>> from_networkx(networkx.petersen_graph(), name="petersen").diameter()
    2
    """
    kinds = {node: _kind(NodeKind, data.get("kind", "rank")) for node, data in graph.nodes.items()}
    order = sorted(graph.nodes, key=lambda node: kinds[node] != NodeKind.RANK)
    number = {node: i for i, node in enumerate(order)}
    rows = [(*_edge(edge, number), data) for *edge, data in _edges(graph)]
    if not graph.is_directed():
        rows += [(dst, src, link, data) for src, dst, link, data in rows]
    elif graph.is_multigraph() and len({row[2] for row in rows}) == len(rows):
        rows.sort(key=lambda row: row[2])
    names = tuple(str(graph.nodes[node].get("name", node)) for node in order)
    plain = names == tuple(map(str, range(len(names))))
    return Topology(
        name=name or str(graph.graph.get("name", "")) or "graph",
        num_ranks=sum(kind == NodeKind.RANK for kind in kinds.values()),
        nodes=Nodes(
            kind=np.array([kinds[node] for node in order], dtype=np.int8),
            reduces=np.array(
                [bool(graph.nodes[n].get("reduces", False)) for n in order], dtype=bool
            ),
            names=() if plain else names,
        ),
        links=_links(rows),
        routing=Shortest(),
        relays=bool(graph.graph.get("relays", True)) if relays is None else relays,
    )


def _links(rows: list[tuple[int, int, Any, dict[str, Any]]]) -> Links:
    """Returns links from rows of (source, destination, key, attributes)."""
    data = [row[3] for row in rows]
    return Links(
        src=ints([row[0] for row in rows]),
        dst=ints([row[1] for row in rows]),
        bandwidth_Bps=_floats(data, "bandwidth_Bps", NETWORK.bandwidth_Bps),
        latency_s=_floats(data, "latency_s", NETWORK.latency_s),
        kind=np.array([_kind(LinkKind, d.get("kind", "other")) for d in data], dtype=np.int8),
    )


def _edges(graph: Any) -> Any:
    return graph.edges(keys=True, data=True) if graph.is_multigraph() else graph.edges(data=True)


def _edge(edge: list[Any], number: dict[Any, int]) -> tuple[int, int, int]:
    """Returns (source, destination, key) of an edge."""
    key = edge[2] if len(edge) > 2 and isinstance(edge[2], int) else 0
    return number[edge[0]], number[edge[1]], key


def _floats(data: list[dict[str, Any]], name: str, default: float) -> np.ndarray[Any, Any]:
    return np.array([float(row.get(name, default)) for row in data], dtype=np.float64)


def _kind(kinds: type[NodeKind] | type[LinkKind], name: Any) -> int:
    try:
        return int(kinds[str(name).upper()])
    except KeyError:
        known = ", ".join(kind.name.lower() for kind in kinds)
        raise ValueError(f"unknown {kinds.__name__} {name}; expected one of {known}") from None

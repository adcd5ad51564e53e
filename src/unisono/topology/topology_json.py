"""Topologies as JSON text with all columns. A column of equal numbers is written as one number."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.topology.clos import Clos
from unisono.topology.clusters import JoinedServers
from unisono.topology.dragonflies import DragonflyGroups
from unisono.topology.graph import Links, Nodes, Topology
from unisono.topology.lattice import Complete, Lattice
from unisono.topology.routing import Explicit, Routing, Shortest

FORMAT = "unisono-topology"
VERSION = 1
_TYPES = {
    "kind": np.int8,
    "reduces": np.bool_,
    "bandwidth_Bps": np.float64,
    "latency_s": np.float64,
}
_ROUTINGS: dict[str, type[Routing]] = {
    "lattice": Lattice,
    "complete": Complete,
    "clos": Clos,
    "groups": DragonflyGroups,
    "joined": JoinedServers,
    "shortest": Shortest,
    "explicit": Explicit,
}


def to_json(topology: Topology) -> str:
    """Returns the topology as JSON text.

    >>> from unisono import topology
    >>> topology.from_json(topology.to_json(topology.ring(4))) == topology.ring(4)
    True
    """
    return json.dumps(_document(topology), separators=(",", ":"))


def from_json(text: str) -> Topology:
    """Reads a topology from the JSON text of `to_json`. Raises `ValueError` for other text.

    >>> from unisono import topology
    >>> from_json(to_json(topology.ring(4))).num_links == topology.ring(4).num_links
    True
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    return _topology(found)


def _document(topology: Topology) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": topology.name,
        "num_ranks": topology.num_ranks,
        "relays": topology.relays,
        "nodes": {"count": len(topology.nodes), **_columns(topology.nodes)},
        "links": {"count": len(topology.links), **_columns(topology.links)},
        "routing": _written(topology.routing),
    }


def _columns(table: Nodes | Links) -> dict[str, Any]:
    return {field.name: _column(getattr(table, field.name)) for field in fields(table)}


def _column(values: NDArray[Any] | tuple[str, ...]) -> Any:
    if isinstance(values, tuple):
        return list(values)
    return values[0].item() if len(values) and (values == values[0]).all() else values.tolist()


def _written(value: Any) -> Any:
    if isinstance(value, Topology):
        return _document(value)
    if isinstance(value, Routing):
        name = next(name for name, kind in _ROUTINGS.items() if type(value) is kind)
        found = {field.name: _written(getattr(value, field.name)) for field in fields(value)}  # type: ignore[arg-type]
        return {"routing": name, **found}
    return value


def _topology(found: Any) -> Topology:
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"not a topology: expected format {FORMAT}")
    if found.get("version") != VERSION:
        raise ValueError(f"expected topology version {VERSION}, got {found.get('version')}")
    try:
        return Topology(
            name=str(found["name"]),
            num_ranks=int(found["num_ranks"]),
            nodes=Nodes(**_read(found["nodes"], Nodes)),
            links=Links(**_read(found["links"], Links)),
            routing=_routing(found["routing"]),
            relays=bool(found["relays"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"incomplete topology: {error!r}") from error


def _read(table: dict[str, Any], kind: type[Nodes | Links]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for field in fields(kind):
        values = table[field.name]
        if field.name == "names":
            columns["names"] = tuple(str(name) for name in values)
            continue
        array: NDArray[Any] = np.asarray(values, dtype=_TYPES.get(field.name, np.int64))
        columns[field.name] = (
            np.broadcast_to(array, table["count"]).copy() if not array.ndim else array
        )
    return columns


def _routing(found: dict[str, Any]) -> Routing:
    kind = _ROUTINGS.get(found["routing"])
    if kind is None:
        raise ValueError(f"unknown routing {found['routing']}")
    return kind(**{key: _value(value) for key, value in found.items() if key != "routing"})


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return _topology(value) if "format" in value else _routing(value)
    return tuple(_value(item) for item in value) if isinstance(value, list) else value

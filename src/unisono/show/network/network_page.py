"""A network as one HTML file without libraries. Hovering over a node highlights its links. Choosing
two ranks highlights the route between them."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files

import numpy as np

from unisono.show.network.facts import link_kinds, network_facts
from unisono.show.network.network_picture import network_svg
from unisono.topology import Topology

_ROUTES = 72
"""Maximum number of ranks for which the page contains all routes."""


def network_html(topology: Topology) -> str:
    """Returns the page of a network, as HTML text. Raises `UnsupportedError` for more than 4,096
    nodes.

    >>> from unisono import topology
    >>> network_html(topology.ring(8))[:15]
    '<!doctype html>'
    """
    facts = [*network_facts(topology), *link_kinds(topology)]
    rows = "".join(f"<div><dt>{escape(n)}</dt><dd>{escape(v)}</dd></div>" for n, v in facts)
    data = json.dumps(
        {"ranks": topology.num_ranks, "routes": _routes(topology)}, separators=(",", ":")
    )
    page = _file("network", "page.html")
    for mark, text in (
        ("{{title}}", escape(topology.name)),
        ("{{style}}", _file("page.css") + _file("network", "page.css")),
        ("{{facts}}", rows),
        ("{{picture}}", network_svg(topology, heading=False)),
        ("{{data}}", data.replace("<", "\\u003c")),
        ("{{script}}", _file("network", "page.js")),
    ):
        page = page.replace(mark, text)
    return page


def _routes(topology: Topology) -> list[list[int]]:
    """Returns the nodes on the route from each rank to each rank. Returns no routes for many
    ranks."""
    n = topology.num_ranks
    if n > _ROUTES:
        return []
    src, dst = np.divmod(np.arange(n * n), n)
    links, starts = topology.routes(src, dst)
    after = topology.links.dst[links].tolist()
    return [[int(src[i]), *after[starts[i] : starts[i + 1]]] for i in range(n * n)]


def _file(*name: str) -> str:
    return files("unisono.show").joinpath(*name).read_text(encoding="utf-8")

"""Facts about a network, as text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.table import Table

from unisono.show.unit_text import rate_text
from unisono.topology import LinkKind, NodeKind, Topology

Fact = tuple[str, str]

KIND_NAMES = {
    LinkKind.OTHER: "other",
    LinkKind.SHARED_MEMORY: "shared memory",
    LinkKind.NVLINK: "NVLink",
    LinkKind.PCIE: "PCIe",
    LinkKind.CXL: "CXL",
    LinkKind.INTER_SOCKET: "between sockets",
    LinkKind.ETHERNET: "Ethernet",
    LinkKind.ROCE: "RoCE",
    LinkKind.INFINIBAND: "InfiniBand",
}
_NODE_NAMES = {
    NodeKind.SWITCH: ("switch", "switches"),
    NodeKind.NVSWITCH: ("NVSwitch", "NVSwitches"),
    NodeKind.PCIE_SWITCH: ("PCIe switch", "PCIe switches"),
    NodeKind.SOCKET: ("socket", "sockets"),
    NodeKind.NIC: ("network card", "network cards"),
}


def network_facts(topology: Topology) -> list[Fact]:
    """Returns facts such as the diameter, each as (name, value). Raises `ValueError` for a network
    that is not connected.

    >>> from unisono import topology
    >>> network_facts(topology.torus([4, 4]))[2]
    ('diameter', '4 links')
    """
    found = [("ranks", f"{topology.num_ranks:,}"), ("links", f"{topology.num_links:,}")]
    found += [("other nodes", text) for text in [", ".join(_others(topology))] if text]
    found += [
        ("diameter", f"{topology.diameter()} links"),
        ("mean distance", f"{topology.mean_distance():.4g} links"),
        ("bisection", rate_text(topology.bisection_Bps())),
    ]
    reducing = int(topology.nodes.reduces.sum())
    if reducing:
        found.append(("switches that reduce", f"{reducing:,}"))
    return found


def network_table(topology: Topology) -> Table:
    """Returns a table for the terminal with the facts and a row for each kind of link.

    >>> from unisono import topology
    >>> network_table(topology.ring(8)).row_count
    6
    """
    grid = Table(title=topology.name, title_justify="left", show_header=False, show_edge=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, value in network_facts(topology):
        grid.add_row(name, value)
    for name, value in link_kinds(topology):
        grid.add_row(name, value)
    return grid


def link_kinds(topology: Topology) -> list[Fact]:
    """Returns each kind of link, with the number of directed links, their rate and their
    latency."""
    links = topology.links
    rows = np.stack([links.kind, links.bandwidth_Bps, links.latency_s], axis=1)
    found, counts = np.unique(rows, axis=0, return_counts=True)
    return [
        (
            KIND_NAMES[LinkKind(int(kind))],
            f"{count:,} directed links of {rate_text(rate)}, {wait * 1e9:.4g} ns",
        )
        for (kind, rate, wait), count in zip(found, counts, strict=True)
    ]


def _others(topology: Topology) -> Iterator[str]:
    for kind, (one, many) in _NODE_NAMES.items():
        count = int((topology.nodes.kind == kind).sum())
        if count:
            yield f"{count:,} {one if count == 1 else many}"

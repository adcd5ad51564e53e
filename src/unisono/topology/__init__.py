"""Networks of ranks, switches and links: what they are, what they cost, which way messages take.

A builder for each kind, `parse` for all of them in one word, files in `to_json`, `to_networkx`,
`to_nccl_xml` and back, `discover` for this machine.

>>> from unisono import topology
>>> torus = topology.torus([4, 4])
>>> torus.num_ranks, torus.num_links, torus.diameter(), torus.bisection_Bps() / 50e9
(16, 32, 4, 8.0)
"""

from unisono.topology.clos import fat_tree, leaf_spine, rails, star
from unisono.topology.codec import from_json, to_json
from unisono.topology.discovery import discover
from unisono.topology.dragonflies import dragonfly, dragonfly_plus
from unisono.topology.exchange import from_networkx, to_networkx
from unisono.topology.files import load
from unisono.topology.graph import LinkKind, Links, NodeKind, Nodes, Topology
from unisono.topology.joined import cluster, rail_optimised
from unisono.topology.lattice import grid, hypercube, line, mesh, ring, torus
from unisono.topology.nccl import from_nccl_xml, to_nccl_xml
from unisono.topology.servers import dgx, nvswitch, pcie_server
from unisono.topology.spec import names, parse, variable, vary
from unisono.topology.wiring import Cable

__all__ = [
    "Cable",
    "LinkKind",
    "Links",
    "NodeKind",
    "Nodes",
    "Topology",
    "cluster",
    "dgx",
    "discover",
    "dragonfly",
    "dragonfly_plus",
    "fat_tree",
    "from_json",
    "from_nccl_xml",
    "from_networkx",
    "grid",
    "hypercube",
    "leaf_spine",
    "line",
    "load",
    "mesh",
    "names",
    "nvswitch",
    "parse",
    "pcie_server",
    "rail_optimised",
    "rails",
    "ring",
    "star",
    "to_json",
    "to_nccl_xml",
    "to_networkx",
    "torus",
    "variable",
    "vary",
]

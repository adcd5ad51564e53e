"""Networks of ranks, switches and links: construction, properties and routes.

Each kind of topology has a function that builds it, such as `torus`. `parse` builds a topology of
any kind from a short text. `to_json`, `to_networkx` and `to_nccl_xml` convert a topology;
`from_json`, `from_networkx` and `from_nccl_xml` read one. `discover` returns the topology of this
machine.

>>> from unisono import topology
>>> torus = topology.torus([4, 4])
>>> torus.num_ranks, torus.num_links, torus.diameter(), torus.bisection_Bps() / 50e9
(16, 32, 4, 8.0)
"""

from unisono.topology.clos import Clos, fat_tree, leaf_spine, rails, star
from unisono.topology.clusters import JoinedServers, cluster, rail_optimised
from unisono.topology.discovery import discover
from unisono.topology.distance_and_bisection import middle
from unisono.topology.dragonflies import DragonflyGroups, dragonfly, dragonfly_plus
from unisono.topology.files import load
from unisono.topology.graph import LinkKind, Links, NodeKind, Nodes, Topology
from unisono.topology.lattice import Complete, Lattice, grid, hypercube, line, mesh, ring, torus
from unisono.topology.nccl import from_nccl_xml, to_nccl_xml
from unisono.topology.networkx_codec import from_networkx, to_networkx
from unisono.topology.ragged_lists import Floats, Ints, Ragged, counting, distinct, ints, starts_of
from unisono.topology.servers import dgx, nvswitch, pcie_server
from unisono.topology.spec import names, parse, rate, seconds, variable, vary
from unisono.topology.topology_json import from_json, to_json
from unisono.topology.wiring import Cable

__all__ = [
    "Cable",
    "Clos",
    "Complete",
    "DragonflyGroups",
    "Floats",
    "Ints",
    "JoinedServers",
    "Lattice",
    "LinkKind",
    "Links",
    "NodeKind",
    "Nodes",
    "Ragged",
    "Topology",
    "cluster",
    "counting",
    "dgx",
    "discover",
    "distinct",
    "dragonfly",
    "dragonfly_plus",
    "fat_tree",
    "from_json",
    "from_nccl_xml",
    "from_networkx",
    "grid",
    "hypercube",
    "ints",
    "leaf_spine",
    "line",
    "load",
    "mesh",
    "middle",
    "names",
    "nvswitch",
    "parse",
    "pcie_server",
    "rail_optimised",
    "rails",
    "rate",
    "ring",
    "seconds",
    "star",
    "starts_of",
    "to_json",
    "to_nccl_xml",
    "to_networkx",
    "torus",
    "variable",
    "vary",
]

"""Drawings of a topology: a table of facts, a picture (SVG) and a page (HTML).

>>> from unisono import topology
>>> from unisono.show import network
>>> network.network_facts(topology.ring(8))[1]
('links', '8')
"""

from unisono.show.network.facts import network_facts, network_table
from unisono.show.network.network_page import network_html
from unisono.show.network.network_picture import MAX_NODES, network_svg
from unisono.show.network.node_positions import NodePositions, node_positions

__all__ = [
    "MAX_NODES",
    "NodePositions",
    "network_facts",
    "network_html",
    "network_svg",
    "network_table",
    "node_positions",
]

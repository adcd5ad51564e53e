"""Seeing a topology: its facts as a table, the network as a picture (SVG) and as a page (HTML).

>>> from unisono import topology
>>> from unisono.show import network
>>> network.facts(topology.ring(8))[1]
('links', '8')
"""

from unisono.show.network.facts import facts, table
from unisono.show.network.page import html
from unisono.show.network.picture import MAX_NODES, svg
from unisono.show.network.places import Places, places

__all__ = ["MAX_NODES", "Places", "facts", "html", "places", "svg", "table"]

"""Drawings of a schedule: a table, a picture, and an HTML page with an animation.

`view` computes the effect of a schedule round by round; `table`, `svg` and `html` draw the view.
The functions of this package do not open sockets or write files.

>>> from unisono import algorithms, show
>>> view = show.view(algorithms.build("all_reduce", "ring", ranks=8), nbytes=64 << 20)
>>> view.facts[2]
('a rank sends', '112 MiB')
"""

from unisono.show.algorithm_table import choices, table_of
from unisono.show.document import FORMAT, document
from unisono.show.network import network_html, network_svg, network_table
from unisono.show.page import html
from unisono.show.picture import MAX_RANKS, svg
from unisono.show.placement import Arrangement
from unisono.show.schedule_view import ScheduleView, view
from unisono.show.simulation import link_heat_map, time_chart
from unisono.show.table import table
from unisono.show.unit_text import bytes_text, rate_text, time_text

__all__ = [
    "FORMAT",
    "MAX_RANKS",
    "Arrangement",
    "ScheduleView",
    "bytes_text",
    "choices",
    "document",
    "html",
    "link_heat_map",
    "network_html",
    "network_svg",
    "network_table",
    "rate_text",
    "svg",
    "table",
    "table_of",
    "time_chart",
    "time_text",
    "view",
]

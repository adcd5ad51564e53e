"""Seeing a schedule: as a table, as one picture, as a page that plays it.

`tell` works out the story of a schedule; `table`, `svg` and `html` show it. Nothing here touches
a link or a file.

>>> from unisono import algorithms, show
>>> story = show.tell(algorithms.build("all_reduce", "ring", ranks=8), nbytes=64 << 20)
>>> story.facts[2]
('a rank sends', '112 MiB')
"""

from unisono.show.page import html
from unisono.show.picture import MAX_RANKS, svg
from unisono.show.stage import Shape
from unisono.show.story import Story, tell
from unisono.show.table import table

__all__ = ["MAX_RANKS", "Shape", "Story", "html", "svg", "table", "tell"]

"""A schedule as one HTML file that plays it: no network, no library.

`page.html` holds the frame, `page.css` the looks, `draw.js` draws a moment, `page.js` moves in
time. All that is known about the schedule is worked out here and put in as JSON.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from html import escape
from importlib.resources import files
from typing import Any, TypeAlias

from unisono.show.cells import color_name, color_of, label, num_colors
from unisono.show.compact import lines
from unisono.show.holdings import Held, Place, Played
from unisono.show.palette import luminance_of, palette
from unisono.show.picture import refuse_too_many
from unisono.show.placement import Arrangement, Link, Stage
from unisono.show.schedule_view import RoundView, ScheduleView
from unisono.types import Op

Json: TypeAlias = Any
"""Whatever a JSON writer takes."""

_STAGE = 520.0
_SLOTS = 32
"""Cells of more slots than this only show how many ranks have contributed."""
_LINES = 300
"""At most so many lines of text a round."""


def html(story: ScheduleView, *, shape: Arrangement = Arrangement.AUTO) -> str:
    """The page that plays a schedule, as HTML text; `#round=3` in its address opens that round.

    Raises `UnsupportedError` for more than 128 ranks.

    >>> from unisono.algorithms import build
    >>> from unisono.show import view
    >>> html(view(build("all_reduce", "ring", ranks=4)))[:15]
    '<!doctype html>'
    """
    refuse_too_many(story)
    data = json.dumps(_Data(story, shape).build(), separators=(",", ":"), ensure_ascii=False)
    page = _file("page.html")
    page = page.replace("<title>Unisono</title>", f"<title>{escape(story.title)}</title>")
    page = page.replace(
        'id="story"></script>', f'id="story">{data.replace("<", chr(92) + "u003c")}</script>'
    )
    page = re.sub(
        r'<link rel="stylesheet" href="([a-z.]+)">',
        lambda found: f"<style>\n{_file(found[1])}</style>",
        page,
    )
    return re.sub(
        r'<script src="([a-z.]+)"></script>',
        lambda found: f"<script>\n{_file(found[1])}</script>",
        page,
    )


class _Data:
    """What the page is told. Masks and links are numbered, as most of them come often."""

    def __init__(self, story: ScheduleView, shape: Arrangement) -> None:
        self.story = story
        self.schedule = story.schedule
        self.collective = story.schedule.collective
        self.stage = Stage.of(self.collective.ranks, story.links, size=_STAGE, shape=shape)
        self.masks: dict[int, int] = {}
        self.links: dict[Link, int] = {}

    def build(self) -> dict[str, Json]:
        """Everything, as JSON."""
        story, collective = self.story, self.collective
        start = self._writes(story.holdings.start)
        rounds = [self._round(scene) for scene in story.scenes]
        colors = palette(num_colors(collective))
        return {
            "title": story.title,
            "summary": story.summary,
            "source": story.source,
            "problem": story.problem,
            "facts": story.facts,
            "meaning": self._meaning(),
            "ranks": collective.ranks,
            "root": collective.root,
            "thin": collective.ranks > _SLOTS,
            "slots": collective.ranks if collective.op.reduces else 1,
            "columns": story.cells.columns,
            "cells": story.cells.rows,
            "wanted": [len(collective.wanted(rank)) for rank in range(collective.ranks)],
            "allWanted": story.wanted,
            "doneAtStart": sum(write[4] for write in start),
            "chunkLabels": [label(self.schedule, i) for i in range(self.schedule.num_locations)],
            "chunkColors": [color_of(collective, i) for i in range(collective.num_chunks)],
            "colors": colors,
            "colorNames": [color_name(collective, i) for i in range(len(colors))],
            "inks": ["#10131a" if luminance_of(color) > 0.2 else "#ffffff" for color in colors],
            "stage": {
                "size": self.stage.size,
                "radius": self.stage.radius,
                "inside": self.stage.spacious,
                "points": [(round(x, 1), round(y, 1)) for x, y in self.stage.points],
            },
            "start": start,
            "rounds": rounds,
            "links": [self._link(link) for link in self.links],
            "masks": [f"{mask:x}" for mask in self.masks],
            "amounts": [story.scale.text(count) for count in range(self._most() + 1)],
        }

    def _round(self, scene: RoundView) -> dict[str, Json]:
        return {
            "number": scene.number,
            "kind": scene.kind,
            "arrows": self._arrows(scene.played),
            "writes": self._writes(scene.played.writes),
            "lines": lines(self.schedule, scene.transfers, limit=_LINES),
            "done": scene.done,
        }

    def _writes(self, writes: dict[Place, Held]) -> list[tuple[int, int, int, int, int]]:
        """(rank, location, chunk, number of the mask, whether that is what must be there)."""
        return [
            (
                *place,
                held.chunk,
                self.masks.setdefault(held.mask, len(self.masks)),
                int(self.story.is_done(place, held)),
            )
            for place, held in writes.items()
        ]

    def _arrows(self, played: Played) -> list[tuple[int, int, list[int]]]:
        """(number of the link, whether it reduces, chunks)."""
        carried: dict[tuple[Link, bool], list[int]] = defaultdict(list)
        for move in played.moves:
            carried[(move.src, move.dst), move.reduce].append(move.held.chunk)
        return [
            (self.links.setdefault(link, len(self.links)), int(reduce), chunks)
            for (link, reduce), chunks in carried.items()
        ]

    def _link(self, link: Link) -> dict[str, Json]:
        arrow = self.stage.arrow(*link)
        return {"src": link[0], "dst": link[1], "path": arrow.path, "tip": arrow.tip}

    def _most(self) -> int:
        """The largest amount that the page may have to say: what a rank or a link sends in all."""
        sent = Counter[int]()
        for (src, _), count in self.story.links.items():
            sent[src] += count
        return max(sent.values(), default=0)

    def _meaning(self) -> str:
        """What rows, columns and cells are."""
        columns = "chunks"
        if self.collective.op is Op.ALL_TO_ALL:
            columns = "the pieces that the rank must receive, by source"
        cell = "filled when the rank holds the chunk"
        if self.collective.op.reduces:
            cell = "one slot a rank, filled when that rank has contributed"
            if self.collective.ranks > _SLOTS:
                cell = "the stronger the more ranks have contributed"
        size = "" if self.story.scale.nbytes else " N is the larger buffer of a rank."
        return (
            f"Rows are ranks, columns {columns}. A cell: {cell}; framed when written in this "
            f"round; ✓ when it is what must be there in the end.{size}"
        )


def _file(name: str) -> str:
    return files("unisono.show").joinpath(name).read_text(encoding="utf-8")

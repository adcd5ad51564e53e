"""A schedule as one HTML file with an animation, without network access or libraries.

`page.html` has the structure, `page.css` the style. `draw.js` draws the state at one time, and
`page.js` controls the time. This module computes all data about the schedule and inserts them as
JSON.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from html import escape
from importlib.resources import files
from typing import Any, TypeAlias

from unisono.show.cells import color_name, color_of, label, num_colors
from unisono.show.holdings import Held, Place, ReplayedRound
from unisono.show.palette import luminance_of, palette
from unisono.show.picture import refuse_too_many
from unisono.show.placement import Arrangement, Link, Stage
from unisono.show.schedule_view import RoundView, ScheduleView
from unisono.show.transfer_text import lines
from unisono.types import Op

Json: TypeAlias = Any
"""A value that can be written as JSON."""

_STAGE = 520.0
_SLOTS = 32
"""Maximum number of slots; with more ranks, a cell shows only the number of contributing ranks."""
_LINES = 300
"""Maximum number of text lines per round."""


def html(view: ScheduleView, *, shape: Arrangement = Arrangement.AUTO) -> str:
    """Returns the page that animates a schedule, as HTML text. `#round=3` in the page's address
    opens round 3.

    Raises `UnsupportedError` for more than 128 ranks.

    >>> from unisono.algorithms import build
    >>> from unisono.show import view
    >>> html(view(build("all_reduce", "ring", ranks=4)))[:15]
    '<!doctype html>'
    """
    refuse_too_many(view)
    data = json.dumps(_Data(view, shape).build(), separators=(",", ":"), ensure_ascii=False)
    page = _file("page.html")
    page = page.replace("<title>Unisono</title>", f"<title>{escape(view.title)}</title>")
    page = page.replace(
        'id="view"></script>', f'id="view">{data.replace("<", chr(92) + "u003c")}</script>'
    )
    page = re.sub(
        r'<link rel="stylesheet" href="([a-z.]+)">',
        lambda match: f"<style>\n{_file(match[1])}</style>",
        page,
    )
    return re.sub(
        r'<script src="([a-z.]+)"></script>',
        lambda match: f"<script>\n{_file(match[1])}</script>",
        page,
    )


class _Data:
    """The data of the page. Masks and links are replaced by numbers, which shortens the page,
    because most of them occur often."""

    def __init__(self, view: ScheduleView, shape: Arrangement) -> None:
        self.view = view
        self.schedule = view.schedule
        self.collective = view.schedule.collective
        self.stage = Stage.of(self.collective.ranks, view.links, size=_STAGE, shape=shape)
        self.masks: dict[int, int] = {}
        self.links: dict[Link, int] = {}

    def build(self) -> dict[str, Json]:
        """Returns all data as JSON."""
        view, collective = self.view, self.collective
        start = self._writes(view.holdings.start)
        rounds = [self._round(round_) for round_ in view.rounds]
        colors = palette(num_colors(collective))
        return {
            "title": view.title,
            "summary": view.summary,
            "source": view.source,
            "problem": view.problem,
            "facts": view.facts,
            "meaning": self._meaning(),
            "ranks": collective.ranks,
            "root": collective.root,
            "thin": collective.ranks > _SLOTS,
            "slots": collective.ranks if collective.op.reduces else 1,
            "columns": view.cells.columns,
            "cells": view.cells.rows,
            "wanted": [len(collective.wanted(rank)) for rank in range(collective.ranks)],
            "allWanted": view.wanted,
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
            "amounts": [view.scale.text(count) for count in range(self._most() + 1)],
        }

    def _round(self, round_: RoundView) -> dict[str, Json]:
        return {
            "number": round_.number,
            "kind": round_.kind,
            "arrows": self._arrows(round_.replayed),
            "writes": self._writes(round_.replayed.writes),
            "lines": lines(self.schedule, round_.transfers, limit=_LINES),
            "done": round_.done,
        }

    def _writes(self, writes: dict[Place, Held]) -> list[tuple[int, int, int, int, int]]:
        """Returns (rank, location, chunk, mask number, 1 if the contents are final, else 0) for
        each location in `writes`."""
        return [
            (
                *place,
                held.chunk,
                self.masks.setdefault(held.mask, len(self.masks)),
                int(self.view.is_done(place, held)),
            )
            for place, held in writes.items()
        ]

    def _arrows(self, replayed: ReplayedRound) -> list[tuple[int, int, list[int]]]:
        """Returns (link number, 1 for a reduction, chunks) of each arrow."""
        carried: dict[tuple[Link, bool], list[int]] = defaultdict(list)
        for move in replayed.moves:
            carried[(move.src, move.dst), move.reduce].append(move.held.chunk)
        return [
            (self.links.setdefault(link, len(self.links)), int(reduce), chunks)
            for (link, reduce), chunks in carried.items()
        ]

    def _link(self, link: Link) -> dict[str, Json]:
        arrow = self.stage.arrow(*link)
        return {"src": link[0], "dst": link[1], "path": arrow.path, "tip": arrow.tip}

    def _most(self) -> int:
        """Returns the largest number of chunks that a rank sends in all rounds together. The page
        prints no larger amount."""
        sent = Counter[int]()
        for (src, _), count in self.view.links.items():
            sent[src] += count
        return max(sent.values(), default=0)

    def _meaning(self) -> str:
        """Returns a text that explains rows, columns and cells."""
        columns = "chunks"
        if self.collective.op is Op.ALL_TO_ALL:
            columns = "the pieces that the rank must receive, by source"
        cell = "filled when the rank holds the chunk"
        if self.collective.op.reduces:
            cell = "one slot per rank, filled when that rank has contributed"
            if self.collective.ranks > _SLOTS:
                cell = "darker if more ranks have contributed"
        size = "" if self.view.scale.nbytes else " N is the size of a rank's larger buffer."
        return (
            f"Rows are ranks, columns {columns}. A cell is {cell}. It has a frame if it "
            f"is written in this round, and ✓ if its contents are final.{size}"
        )


def _file(name: str) -> str:
    return files("unisono.show").joinpath(name).read_text(encoding="utf-8")

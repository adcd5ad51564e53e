"""One panel of the static picture: the arrows of a round, above the ranks' contents after the
round."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby

from unisono.show.cells import color_of, num_colors
from unisono.show.holdings import Held, Place
from unisono.show.palette import palette
from unisono.show.placement import Arrangement, Link, Stage, number
from unisono.show.schedule_view import RoundView, ScheduleView
from unisono.show.svg_elements import (
    FAINT,
    INK,
    PAPER,
    SOFT,
    draw_arrow,
    draw_badge,
    draw_text,
    runs,
)
from unisono.show.transfer_text import chunks_by_link

WIDTH = 216.0
_STAGE, _TOP, _LEFT, _ROWS = 200.0, 20.0, 30.0, 208.0
_THICK_ARROWS = 17
"""Maximum number of links that are drawn as thick arrows."""
_MATRIX_ARROWS = 280
"""Maximum number of links that are drawn as arrows; more links are drawn as a matrix of sources and
destinations."""
_SLOT = 1.5
"""Minimum width of a slot; in narrower cells, the opacity shows the number of contributions."""
_LEVELS = 16


class Panels:
    """Draws the panels of a schedule, all at the same scale."""

    def __init__(self, view: ScheduleView, shape: Arrangement) -> None:
        self.view = view
        self.collective = view.schedule.collective
        self.colors = palette(num_colors(self.collective))
        self.stage = Stage.of(self.collective.ranks, view.links, size=_STAGE, shape=shape)
        self.cell_width = min((WIDTH - _LEFT - 4) / max(1, len(view.cells.columns)), 90.0)
        self.cell_height = max(1.6, min(15.0, _ROWS / self.collective.ranks))

    @property
    def height(self) -> float:
        """Height of a panel, in units of the SVG."""
        rows = 24 + self.cell_height * self.collective.ranks if self.view.wanted else 0
        return _TOP + _STAGE + rows

    @property
    def has_slots(self) -> bool:
        """True if cells show which ranks contributed. Otherwise, cells show only how many."""
        ranks = self.collective.ranks
        return self.collective.op.reduces and self.cell_width / ranks >= _SLOT

    @property
    def has_frames(self) -> bool:
        """True if cells are large enough for lines between them and frames around them."""
        return min(self.cell_width, self.cell_height) >= 5

    def draw(self, round_: RoundView | None, state: dict[Place, Held]) -> str:
        """Draws one panel: a round and the contents after the round, or the initial contents if
        `round_` is None."""
        parts = [self._title(round_)]
        links = {(t.src, t.dst) for t in round_.transfers} if round_ is not None else set()
        parts.append(f'<g transform="translate({number((WIDTH - _STAGE) / 2)} {number(_TOP)})">')
        if len(links) > _MATRIX_ARROWS:
            parts += self._matrix(links)
        else:
            parts += self._arrows(round_, links) if round_ is not None else ()
            parts += self._ranks()
        parts.append("</g>")
        if self.view.wanted:
            written = set(round_.replayed.writes) if round_ is not None else set()
            parts.append(f'<g transform="translate({_LEFT:g} {number(_TOP + _STAGE + 24)})">')
            parts += self._labels()
            parts += self._cells(state)
            parts += self._lines()
            parts += self._outlines(written)
            parts.append("</g>")
        return "".join(parts)

    def _title(self, round_: RoundView | None) -> str:
        name, kind = ("start", "") if round_ is None else (f"round {round_.number}", round_.kind)
        return (
            f'<text x="{number(WIDTH / 2)}" y="12" font-size="13" text-anchor="middle">'
            f'<tspan font-weight="650">{name}</tspan>'
            f'<tspan fill="{SOFT}">{" · " * bool(kind)}{kind}</tspan></text>'
        )

    def _ranks(self) -> Iterator[str]:
        stage = self.stage
        every = 1 if self.collective.ranks <= 24 else 8
        for rank, (x, y) in enumerate(stage.points):
            root = rank == self.collective.root
            yield (
                f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(stage.radius)}" '
                f'fill="{INK if root or not stage.spacious else PAPER}" stroke="{INK}" '
                f'stroke-width="{1.3 if stage.spacious else 0.3}"/>'
            )
            if stage.spacious:
                size = min(12.0, stage.radius * 1.05)
                yield draw_text(
                    x,
                    y + size * 0.36,
                    str(rank),
                    size=size,
                    anchor="middle",
                    fill=PAPER if root else INK,
                    weight=600,
                )
            elif rank % every == 0:
                out = math.atan2(y - stage.size / 2, x - stage.size / 2)
                far = stage.radius + 9
                at = x + far * math.cos(out), y + far * math.sin(out) + 3
                yield draw_text(*at, str(rank), size=8, anchor="middle", fill=SOFT)

    def _arrows(self, round_: RoundView, links: set[Link]) -> Iterator[str]:
        colors: dict[tuple[int, int, bool], set[int]] = defaultdict(set)
        for move in round_.replayed.moves:
            key = move.src, move.dst, move.reduce
            colors[key].add(color_of(self.collective, move.held.chunk))
        few = len(links) <= _THICK_ARROWS
        width = (
            1.9 if few else 1.2 if not self.stage.spacious else max(0.45, 1.5 - len(links) / 200)
        )
        labelled = few and self.collective.ranks <= 9 and len(self.view.cells.columns) > 1
        texts = chunks_by_link(self.view.schedule, round_.transfers) if labelled else {}
        badges = []
        for (src, dst, reduce), found in colors.items():
            arrow = self.stage.arrow(src, dst)
            color = self.colors[next(iter(found))] if len(found) == 1 else SOFT
            yield draw_arrow(arrow, color, reduce, width=width, opacity=1 if few else 0.75)
            if labelled:
                badges.append(draw_badge(arrow, texts[src, dst], color))
        yield from badges

    def _matrix(self, links: set[Link]) -> Iterator[str]:
        """Draws a matrix. Rows are sources and columns are destinations; adjacent links become one
        bar."""
        ranks, side, start = self.collective.ranks, 168.0, 20.0
        cell = side / ranks
        middle = start + side / 2
        yield draw_text(middle, 13, "to rank", size=9, anchor="middle", fill=SOFT)
        rotation = f"translate(13 {number(middle)}) rotate(-90)"
        yield f'<g transform="{rotation}">'
        yield draw_text(0, 0, "from rank", size=9, anchor="middle", fill=SOFT)
        yield f'</g><g transform="translate({start:g} {start:g})">'
        yield f'<rect width="{side:g}" height="{side:g}" fill="{FAINT}"/>'
        for src in range(ranks):
            color = self.colors[src % len(self.colors)]
            for first, last in runs(sorted(dst for a, dst in links if a == src)):
                yield (
                    f'<rect x="{number(first * cell)}" y="{number(src * cell)}" '
                    f'width="{number((last + 1 - first) * cell)}" height="{number(cell)}" '
                    f'fill="{color}"/>'
                )
        yield "</g>"

    def _labels(self) -> Iterator[str]:
        columns = self.view.cells.columns
        every = math.ceil((5 * max(map(len, columns)) + 3) / self.cell_width)
        for column in range(0, len(columns), every):
            x = (column + 0.5) * self.cell_width
            yield draw_text(x, -4, columns[column], size=8, anchor="middle", fill=SOFT)
        every = 1 if self.cell_height >= 9 else 8
        for rank in range(0, self.collective.ranks, every):
            y = rank * self.cell_height + max(self.cell_height, 6) / 2 + 3
            yield draw_text(-6, y, str(rank), size=9, anchor="end", fill=SOFT)

    def _cells(self, state: dict[Place, Held]) -> Iterator[str]:
        """Draws the cells column by column; equal adjacent cells become one SVG path."""
        rows, high = self.view.cells.rows, self.cell_height
        wide = self.cell_width * len(self.view.cells.columns)
        yield f'<rect width="{number(wide)}" height="{number(high * len(rows))}" fill="{FAINT}"/>'
        for column in range(len(self.view.cells.columns)):
            styles = [
                self._cell_style(state.get((rank, row[column]))) for rank, row in enumerate(rows)
            ]
            for style, ranks in groupby(range(len(rows)), key=styles.__getitem__):
                if style is not None:
                    first, *rest = ranks
                    yield self._mark(style, column, first, len(rest) + 1)

    def _cell_style(self, held: Held | None) -> tuple[int, int, int] | None:
        """Returns the style of a cell: its colour, its filled slots, and its opacity level."""
        if held is None:
            return None
        color = color_of(self.collective, held.chunk)
        if not self.collective.op.reduces:
            return color, 1, _LEVELS
        if self.has_slots:
            return color, held.mask, _LEVELS
        return color, 1, max(1, _LEVELS * held.mask.bit_count() // self.collective.ranks)

    def _mark(self, style: tuple[int, int, int], column: int, rank: int, count: int) -> str:
        color, mask, level = style
        slots = self.collective.ranks if self.has_slots else 1
        wide, high = self.cell_width / slots, self.cell_height * count
        path = "".join(
            f"M{number(column * self.cell_width + first * wide)} {number(rank * self.cell_height)}"
            f"h{number((last + 1 - first) * wide)}v{number(high)}"
            f"h{number((first - last - 1) * wide)}z"
            for first, last in runs([r for r in range(slots) if mask >> r & 1])
        )
        opacity = "" if level == _LEVELS else f' opacity="{0.08 + 0.8 * level / _LEVELS:.2f}"'
        return f'<path d="{path}" fill="{self.colors[color]}"{opacity}/>'

    def _lines(self) -> Iterator[str]:
        """Draws lines between the cells if they are large enough."""
        columns, rows = len(self.view.cells.columns), len(self.view.cells.rows)
        if not self.has_frames:
            return
        wide, high = number(self.cell_width * columns), number(self.cell_height * rows)
        path = "".join(f"M0 {number(i * self.cell_height)}h{wide}" for i in range(1, rows))
        path += "".join(f"M{number(i * self.cell_width)} 0v{high}" for i in range(1, columns))
        yield f'<path d="{path}" stroke="{PAPER}" stroke-width="1.4" fill="none"/>'

    def _outlines(self, written: set[Place]) -> Iterator[str]:
        """Draws frames around the cells that the round wrote."""
        if not self.has_frames:
            return
        for rank, row in enumerate(self.view.cells.rows):
            for column, location in enumerate(row):
                if (rank, location) in written:
                    yield (
                        f'<rect x="{number(column * self.cell_width)}" '
                        f'y="{number(rank * self.cell_height)}" width="{number(self.cell_width)}" '
                        f'height="{number(self.cell_height)}" fill="none" stroke="{INK}" '
                        f'stroke-width="1.5"/>'
                    )

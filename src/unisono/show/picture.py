"""A schedule as one static SVG, for a slide or a page: one panel per round, left to right."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

from unisono.errors import UnsupportedError
from unisono.show.cells import color_name
from unisono.show.panel import WIDTH, Panels
from unisono.show.placement import Arrangement, Arrow, number
from unisono.show.schedule_view import ScheduleView
from unisono.show.svg_elements import INK, SOFT, draw_arrow, draw_document, draw_text
from unisono.types import Op

MAX_RANKS = 128
"""Maximum number of ranks; larger drawings would be illegible."""
PANELS = 16
"""Maximum number of panels, including the panel of the initial contents."""

_GAP = 26.0
_CHARACTER_WIDTH = 0.53
"""Width of a character as a fraction of the font size, slightly more than in usual fonts."""


def svg(view: ScheduleView, *, shape: Arrangement = Arrangement.AUTO) -> str:
    """Returns the picture of a schedule, as SVG text. Of many rounds, some in the middle are
    omitted.

    Raises `UnsupportedError` for more than 128 ranks.

    >>> from unisono.algorithms import build
    >>> from unisono.show import view
    >>> svg(view(build("all_reduce", "ring", ranks=4)))[:4]
    '<svg'
    """
    refuse_too_many(view)
    return _Picture(view, shape).draw()


def refuse_too_many(view: ScheduleView) -> None:
    """Raises `UnsupportedError` if there are too many ranks to draw."""
    ranks = view.schedule.collective.ranks
    if ranks > MAX_RANKS:
        raise UnsupportedError(f"pictures have at most {MAX_RANKS} ranks, got {ranks}")


def pick(kinds: Sequence[str], limit: int) -> list[int]:
    """Returns up to `limit` rounds to draw: the first, the last, and rounds at which the kind of
    transfers changes.

    >>> pick(["reduce"] * 6 + ["copy"] * 6, 8)
    [0, 1, 4, 5, 6, 7, 10, 11]
    """
    count = len(kinds)
    boundaries = [0, count, *(i for i in range(1, count) if kinds[i] != kinds[i - 1])]
    by_distance = sorted(
        range(count), key=lambda i: min(abs(i + 0.5 - boundary) for boundary in boundaries)
    )
    return sorted(by_distance[:limit])


class _Picture:
    def __init__(self, view: ScheduleView, shape: Arrangement) -> None:
        self.view = view
        self.panels = Panels(view, shape)

    def draw(self) -> str:
        panels = list(self._panels())
        step, high = WIDTH + _GAP, self.panels.height + _GAP
        across = _columns(len(panels), step, high)
        width = max(across * step + _GAP, 680.0)
        head, foot = list(self._head(width)), list(self._legend(width))
        top = 18.0 * len(head) + 46
        bottom = top + math.ceil(len(panels) / across) * high + 6
        left = (width - across * step + _GAP) / 2
        height = bottom + 18.0 * len(foot) + 14
        body = [
            _at(left + i % across * step, top + i // across * high, panel)
            for i, panel in enumerate(panels)
        ]
        return draw_document(
            (width, height),
            self.view.title,
            [
                *(_at(_GAP, 38 + 21.0 * i, line) for i, line in enumerate(head)),
                *body,
                *(_at(_GAP, bottom + 18.0 * i, line) for i, line in enumerate(foot)),
            ],
            summary=self.view.summary,
        )

    def _panels(self) -> Iterator[str]:
        """Yields the panels of the initial contents and of the picked rounds, with dots for omitted
        rounds."""
        rounds, holdings = self.view.rounds, self.view.holdings
        yield self.panels.draw(None, dict(holdings.start))
        before = -1
        for at in pick([round_.kind for round_ in rounds], PANELS - 1):
            panel = self.panels.draw(rounds[at], holdings.after(at + 1))
            if skipped := at - before - 1:
                panel += draw_text(-_GAP / 2, 124, "⋯", size=20, anchor="middle")
                panel += draw_text(-_GAP / 2, 140, f"+{skipped}", size=9, anchor="middle")
            before = at
            yield panel

    def _head(self, width: float) -> Iterator[str]:
        """Yields the title, the summary and the facts of the schedule, and the error if the
        schedule is wrong."""
        view = self.view
        yield draw_text(0, 0, view.title, size=22, weight=650)
        for line in _wrap(view.summary, 13, width):
            yield draw_text(0, 2, line, size=13)
        for line in _wrap(" · ".join(f"{name} {value}" for name, value in view.facts), 12, width):
            yield draw_text(0, 2, line, size=12, fill=SOFT)
        for line in _wrap(f"WRONG: {view.problem}" if view.problem else "", 13, width):
            yield draw_text(0, 2, line, size=13, fill="#b3261e", weight=650)

    def _legend(self, width: float) -> Iterator[str]:
        collective, colors = self.view.schedule.collective, self.panels.colors
        parts, x = [], 0.0
        kinds = ((True, "reduce"), (False, "copy"))
        for reduce, word in kinds if collective.op.reduces else kinds[1:]:
            arrow = Arrow(path=f"M{number(x)} 0h30", tip=(x + 30, 0.0, 0.0), label=(x, 0.0))
            parts.append(draw_arrow(arrow, INK, reduce, width=1.8, opacity=1))
            parts.append(draw_text(x + 38, 4, word, size=11))
            x += 60 + 6 * len(word)
        names = [color_name(collective, i) for i in range(len(colors))]
        if len(names) > 1 and x + sum(28 + 6 * len(name) for name in names) < width - _GAP:
            for name, color in zip(names, colors, strict=True):
                parts.append(
                    f'<rect x="{number(x)}" y="-5" width="10" height="10" rx="2" fill="{color}"/>'
                )
                parts.append(draw_text(x + 14, 4, name, size=11))
                x += 28 + 6 * len(name)
        yield "".join(parts)
        for line in _wrap(self._meaning(), 11, width):
            yield draw_text(0, 5, line, size=11, fill=SOFT)

    def _meaning(self) -> str:
        """Returns a text that explains rows, columns and cells."""
        collective = self.view.schedule.collective
        columns = "the pieces received, by source" if collective.op is Op.ALL_TO_ALL else "chunks"
        fill = ""
        if collective.op.reduces:
            fill = " A cell is darker if more ranks have contributed."
            if self.panels.has_slots:
                fill = " A cell has one slot per rank, filled when that rank has contributed."
        size = "" if self.view.scale.nbytes else " N is the size of a rank's larger buffer."
        frames = "; outlined: written in this round" if self.panels.has_frames else ""
        return f"Rows are ranks, columns {columns}{frames}.{fill}{size}"


def _at(x: float, y: float, drawing: str) -> str:
    return f'<g transform="translate({number(x)} {number(y)})">{drawing}</g>'


def _wrap(text: str, size: float, width: float) -> list[str]:
    return textwrap.wrap(text, int((width - 2 * _GAP) / (size * _CHARACTER_WIDTH)))


def _columns(panels: int, wide: float, high: float) -> int:
    """Returns the number of panels per row for which the picture is closest to the shape of a
    slide, 16:9."""

    def misfit(across: int) -> float:
        down = math.ceil(panels / across)
        shape = across * wide / (down * high + 150)
        return abs(math.log(shape / (16 / 9))) + 0.15 * (across * down - panels)

    return min(range(1, panels + 1), key=misfit)

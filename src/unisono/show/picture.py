"""A schedule as one static SVG, for a slide or a page: a panel a round, left to right."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from html import escape

from unisono.errors import UnsupportedError
from unisono.show.cells import color_name
from unisono.show.marks import INK, PAPER, SOFT, draw_arrow, draw_text
from unisono.show.panel import WIDTH, Panels
from unisono.show.placement import Arrangement, Arrow, number
from unisono.show.schedule_view import ScheduleView
from unisono.types import Op

MAX_RANKS = 128
"""Above this nothing could be told apart."""
PANELS = 16
"""At most so many panels are drawn, the start included."""

_GAP = 26.0
_LETTER = 0.53
"""Width of a letter as a share of its size; a bit more than the usual fonts need."""
FONTS = "Inter, system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"


def svg(story: ScheduleView, *, shape: Arrangement = Arrangement.AUTO) -> str:
    """The picture of a schedule, as SVG text; the middle of many rounds is left out.

    Raises `UnsupportedError` for more than 128 ranks.

    >>> from unisono.algorithms import build
    >>> from unisono.show import view
    >>> svg(view(build("all_reduce", "ring", ranks=4)))[:4]
    '<svg'
    """
    refuse_too_many(story)
    return _Picture(story, shape).draw()


def refuse_too_many(story: ScheduleView) -> None:
    """Raise `UnsupportedError` when there are too many ranks to draw."""
    ranks = story.schedule.collective.ranks
    if ranks > MAX_RANKS:
        raise UnsupportedError(f"pictures show up to {MAX_RANKS} ranks; this has {ranks}")


def pick(kinds: Sequence[str], limit: int) -> list[int]:
    """Which of many rounds to draw: the first, the last, and those where the kind changes.

    >>> pick(["reduce"] * 6 + ["copy"] * 6, 8)
    [0, 1, 4, 5, 6, 7, 10, 11]
    """
    count = len(kinds)
    turns = [0, count, *(i for i in range(1, count) if kinds[i] != kinds[i - 1])]
    by_distance = sorted(range(count), key=lambda i: min(abs(i + 0.5 - turn) for turn in turns))
    return sorted(by_distance[:limit])


class _Picture:
    def __init__(self, story: ScheduleView, shape: Arrangement) -> None:
        self.story = story
        self.panels = Panels(story, shape)

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
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
                f'viewBox="0 0 {number(width)} {number(height)}" width="{number(width)}" '
                f'height="{number(height)}" font-family="{FONTS}" fill="{INK}">',
                f"<title>{escape(self.story.title)}</title>",
                f"<desc>{escape(self.story.summary)}</desc>",
                f'<rect width="100%" height="100%" fill="{PAPER}"/>',
                *(_at(_GAP, 38 + 21.0 * i, line) for i, line in enumerate(head)),
                *body,
                *(_at(_GAP, bottom + 18.0 * i, line) for i, line in enumerate(foot)),
                "</svg>\n",
            ]
        )

    def _panels(self) -> Iterator[str]:
        """The start, then the rounds picked, with dots where some were left out."""
        scenes, holdings = self.story.scenes, self.story.holdings
        yield self.panels.draw(None, dict(holdings.start))
        before = -1
        for at in pick([scene.kind for scene in scenes], PANELS - 1):
            panel = self.panels.draw(scenes[at], holdings.after(at + 1))
            if skipped := at - before - 1:
                panel += draw_text(-_GAP / 2, 124, "⋯", size=20, anchor="middle")
                panel += draw_text(-_GAP / 2, 140, f"+{skipped}", size=9, anchor="middle")
            before = at
            yield panel

    def _head(self, width: float) -> Iterator[str]:
        """Title, what it does, the facts, and what is wrong with it."""
        story = self.story
        yield draw_text(0, 0, story.title, size=22, weight=650)
        for line in _wrap(story.summary, 13, width):
            yield draw_text(0, 2, line, size=13)
        for line in _wrap(" · ".join(f"{name} {value}" for name, value in story.facts), 12, width):
            yield draw_text(0, 2, line, size=12, fill=SOFT)
        for line in _wrap(f"WRONG: {story.problem}" if story.problem else "", 13, width):
            yield draw_text(0, 2, line, size=13, fill="#b3261e", weight=650)

    def _legend(self, width: float) -> Iterator[str]:
        collective, colors = self.story.schedule.collective, self.panels.colors
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
        """What rows, columns and cells are."""
        collective = self.story.schedule.collective
        columns = "the pieces received, by source" if collective.op is Op.ALL_TO_ALL else "chunks"
        fill = ""
        if collective.op.reduces:
            fill = " A cell gets stronger with the number of ranks that have contributed."
            if self.panels.has_slots:
                fill = " A cell has one slot a rank, filled when that rank has contributed."
        size = "" if self.story.scale.nbytes else " N is the larger buffer of a rank."
        frames = "; outlined: written in this round" if self.panels.has_frames else ""
        return f"Rows are ranks, columns {columns}{frames}.{fill}{size}"


def _at(x: float, y: float, drawing: str) -> str:
    return f'<g transform="translate({number(x)} {number(y)})">{drawing}</g>'


def _wrap(text: str, size: float, width: float) -> list[str]:
    return textwrap.wrap(text, int((width - 2 * _GAP) / (size * _LETTER)))


def _columns(panels: int, wide: float, high: float) -> int:
    """How many panels side by side come nearest to the shape of a slide, 16:9."""

    def misfit(across: int) -> float:
        down = math.ceil(panels / across)
        shape = across * wide / (down * high + 150)
        return abs(math.log(shape / (16 / 9))) + 0.15 * (across * down - panels)

    return min(range(1, panels + 1), key=misfit)

"""A chart of times over sizes, with one line per algorithm and logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import fmean

from unisono.show.palette import palette
from unisono.show.placement import number
from unisono.show.svg_elements import FAINT, SOFT, draw_document, draw_text
from unisono.show.unit_text import bytes_text, time_text

_LEFT, _TOP, _WIDE, _HIGH, _NAMES = 78.0, 52.0, 720.0, 420.0, 260.0
_LEADER, _LINE = 40.0, 14.0


def time_chart(
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    across: Callable[[float], str] = bytes_text,
    shares: bool = False,
) -> str:
    """Returns an SVG chart with one line per name. Points are (bytes, seconds), all above 0.

    `across` formats the values of the horizontal axis, by default as bytes. With `shares`, the
    second number of a point is a fraction from 0 to 1 instead of seconds. Raises `ValueError` if no
    line has a point.

    >>> time_chart("all_reduce", {"ring": [(1e3, 1e-5), (1e6, 1e-3)]})[:4]
    '<svg'
    """
    points = [point for line in lines.values() for point in line]
    if not points:
        raise ValueError("time_chart needs at least one point")
    xs, ys = [x for x, _ in points], [y for _, y in points]
    along = _Axis(min(xs), max(xs), 2)
    up = _Shares() if shares else _Times(min(ys), max(ys), 10)
    wide, high = _LEFT + _WIDE + _NAMES, _TOP + _HIGH + 56
    return draw_document(
        (wide, high),
        title,
        [
            draw_text(_LEFT, 30, title, size=17, weight=650),
            *_grid(along, up, sorted(set(xs)), across),
            *_lines(lines, along, up),
        ],
    )


class _Axis:
    """Maps a value to its position on the axis, from 0 to 1."""

    def __init__(self, low: float, high: float, base: int) -> None:
        self.base = base
        self.low, self.high = math.log(low, base), math.log(high, base)

    def at(self, value: float) -> float:
        span = self.high - self.low
        return (math.log(value, self.base) - self.low) / span if span else 0.5


class _Times(_Axis):
    """A time axis that ends at whole decades."""

    def __init__(self, low: float, high: float, base: int) -> None:
        super().__init__(low, high, base)
        self.low, self.high = math.floor(self.low + 1e-9), math.ceil(self.high - 1e-9)

    def marks(self) -> list[tuple[float, str]]:
        values = [10.0**e for e in range(math.floor(self.low), math.ceil(self.high) + 1)]
        return [(value, time_text(value)) for value in values]


class _Shares:
    """A linear axis from 0 to 1."""

    def at(self, value: float) -> float:
        return value

    def marks(self) -> list[tuple[float, str]]:
        return [(fifth / 5, f"{fifth / 5:.0%}") for fifth in range(6)]


def _grid(
    along: _Axis, up: _Times | _Shares, values: Sequence[float], across: Callable[[float], str]
) -> list[str]:
    found = []
    for value, text in up.marks():
        y = _TOP + _HIGH * (1 - up.at(value))
        found.append(
            f'<path d="M{number(_LEFT)} {number(y)}h{number(_WIDE)}" stroke="{FAINT}" fill="none"/>'
        )
        found.append(draw_text(_LEFT - 8, y + 4, text, size=11, anchor="end", fill=SOFT))
    step = max(1, math.ceil(len(values) / 12))
    for value in values[::step]:
        x = _LEFT + _WIDE * along.at(value)
        text = across(value)
        found.append(
            f'<path d="M{number(x)} {number(_TOP)}v{number(_HIGH)}" stroke="{FAINT}" fill="none"/>'
        )
        found.append(draw_text(x, _TOP + _HIGH + 20, text, size=11, anchor="middle", fill=SOFT))
    return found


def _lines(
    lines: Mapping[str, Sequence[tuple[float, float]]], along: _Axis, up: _Times | _Shares
) -> list[str]:
    found = []
    # Sort names and colours by the last points of the lines, and move overlapping names apart.
    order = sorted((name for name in lines if lines[name]), key=lambda name: -lines[name][-1][1])
    ends = [_TOP + _HIGH * (1 - up.at(lines[name][-1][1])) for name in order]
    for name, color, beside in zip(
        order, _alternate(palette(len(order))), _spread(ends), strict=True
    ):
        points = [
            (_LEFT + _WIDE * along.at(x), _TOP + _HIGH * (1 - up.at(y))) for x, y in lines[name]
        ]
        path = "L".join(f"{number(x)} {number(y)}" for x, y in points)
        found.append(
            f'<path d="M{path}" stroke="{color}" stroke-width="1.8" fill="none" '
            f'stroke-linejoin="round"><title>{escape(name)}</title></path>'
        )
        x, y = points[-1]
        found.append(f'<circle cx="{number(x)}" cy="{number(y)}" r="2.6" fill="{color}"/>')
        right = _LEFT + _WIDE + _LEADER
        found.append(
            f'<path d="M{number(x)} {number(y)}L{number(right - 4)} {number(beside)}" '
            f'stroke="{color}" stroke-width="0.8" fill="none"/>'
        )
        found.append(draw_text(right, beside + 4, name, size=11.5, fill=color))
    return found


def _alternate(colors: Sequence[str]) -> list[str]:
    """Reorders colours so that adjacent lines do not have similar colours."""
    half = (len(colors) + 1) // 2
    return [colors[i // 2 + i % 2 * half] for i in range(len(colors))]


def _spread(places: Sequence[float]) -> list[float]:
    """Moves vertical positions of names as little as possible, so that names do not overlap.

    >>> _spread([100.0, 100.0, 300.0])
    [93.0, 107.0, 300.0]
    """
    # Names that would overlap form a group, which has one list. For each name of the group, the
    # list has the position at which the group must begin so that this name is where it belongs.
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1:
            above, last = groups[-2:]
            if fmean(above) + _LINE * len(above) <= fmean(last):
                break
            groups[-2:] = [[*above, *(at - _LINE * len(above) for at in last)]]
    found = [fmean(group) + _LINE * i for group in groups for i in range(len(group))]
    lowest = _TOP + _HIGH - _LINE * (len(found) - 1)
    return [max(min(y, lowest + _LINE * i), 22 + _LINE * i) for i, y in enumerate(found)]

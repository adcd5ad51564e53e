"""Positions of the ranks, and the arrows between them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

Point = tuple[float, float]
Link = tuple[int, int]
"""(source rank, destination rank)"""


class Arrangement(StrEnum):
    """Positions of the ranks. `auto` means a grid if the links form a grid, else a circle."""

    AUTO = "auto"
    CIRCLE = "circle"
    GRID = "grid"
    LINE = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """A curve between two ranks: an SVG path, its tip (x, y, degrees), and the position of its
    label."""

    path: str
    tip: tuple[float, float, float]
    label: Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Ranks as discs of equal radius in a square with sides of length `size`.

    An arrow bends to the left by the fraction `bend` of its length. Arrows between ranks that are
    not neighbours also bend towards the middle, around other discs.
    """

    size: float
    radius: float
    points: tuple[Point, ...]
    bend: float = 0.12
    pull: float = 0.0

    @classmethod
    def of(
        cls,
        ranks: int,
        links: Iterable[Link],
        *,
        size: float,
        shape: Arrangement = Arrangement.AUTO,
    ) -> Stage:
        """Places the ranks of a schedule that uses these links."""
        columns = 0
        if shape in (Arrangement.AUTO, Arrangement.GRID):
            columns = _grid_columns(ranks, set(links))
        if shape is Arrangement.GRID and not columns:
            columns = math.ceil(math.sqrt(ranks))
        if shape is Arrangement.LINE:
            return _grid(ranks, ranks, size, bend=0.5)
        return _grid(ranks, columns, size, bend=0.2) if columns else _circle(ranks, size)

    @property
    def spacious(self) -> bool:
        """True if a disc has room for its number."""
        return self.radius >= 0.03 * self.size

    def arrow(self, src: int, dst: int) -> Arrow:
        """Returns the arrow of a link. All arrows bend to the left, so the arrow of the opposite
        direction is a different curve."""
        if src == dst:
            return self._loop(src)
        (x1, y1), (x2, y2) = self.points[src], self.points[dst]
        length = math.hypot(x2 - x1, y2 - y1)
        mx, my = (x1 + x2) / 2, (y1 + y2) / 2
        pull = self.pull if abs(src - dst) not in (1, len(self.points) - 1) else 0.0
        cx = mx + self.bend * (y2 - y1) + pull * (self.size / 2 - mx)
        cy = my - self.bend * (x2 - x1) + pull * (self.size / 2 - my)
        gap = min(self.radius + min(2.5, 0.3 * self.radius), 0.4 * length)
        sx, sy = _towards((x1, y1), (cx, cy), gap)
        ex, ey = _towards((x2, y2), (cx, cy), gap)
        angle = math.degrees(math.atan2(ey - cy, ex - cx))
        at = 0.5 if length < 0.45 * self.size else 0.3
        label = tuple(
            (1 - at) ** 2 * a + 2 * at * (1 - at) * b + at**2 * c
            for a, b, c in ((sx, cx, ex), (sy, cy, ey))
        )
        return Arrow(
            path=f"M{number(sx)} {number(sy)}Q{number(cx)} {number(cy)} {number(ex)} {number(ey)}",
            tip=(round(ex, 1), round(ey, 1), round(angle, 1)),
            label=(label[0], label[1]),
        )

    def _loop(self, rank: int) -> Arrow:
        """Returns the arrow of a transfer within a rank: a loop on the outer side of the disc."""
        x, y = self.points[rank]
        out = math.atan2(y - self.size / 2, x - self.size / 2)
        near, far = self.radius + 2, self.radius * 1.6 + 10
        (sx, sy), (ax, ay), (bx, by), (ex, ey) = (
            (x + d * math.cos(out + offset), y + d * math.sin(out + offset))
            for d, offset in ((near, -0.5), (far, -0.7), (far, 0.7), (near, 0.5))
        )
        curve = " ".join(number(v) for v in (ax, ay, bx, by, ex, ey))
        angle = math.degrees(math.atan2(ey - by, ex - bx))
        return Arrow(
            path=f"M{number(sx)} {number(sy)}C{curve}",
            tip=(round(ex, 1), round(ey, 1), round(angle, 1)),
            label=((ax + bx) / 2, (ay + by) / 2),
        )


def number(value: float) -> str:
    """Returns a coordinate as short text.

    >>> number(3.04), number(-0.01)
    ('3', '0')
    """
    return f"{round(value, 1) + 0.0:g}"


def _circle(ranks: int, size: float) -> Stage:
    """Places rank 0 at the top and the other ranks clockwise. If there are only two ranks, they are
    side by side."""
    first = math.pi if ranks == 2 else -math.pi / 2
    far = 0.4 * size if ranks > 1 else 0.0
    points = tuple(
        (
            size / 2 + far * math.cos(first + 2 * math.pi * rank / ranks),
            size / 2 + far * math.sin(first + 2 * math.pi * rank / ranks),
        )
        for rank in range(ranks)
    )
    spacing = 2 * far * math.sin(math.pi / ranks) if ranks > 1 else size
    return Stage(size=size, radius=_radius(spacing, size), points=points, pull=0.45)


def _grid(ranks: int, columns: int, size: float, *, bend: float) -> Stage:
    rows = math.ceil(ranks / columns)
    spacing = 0.84 * size / max(columns - 1, rows - 1, 1)
    left, top = (size - spacing * (columns - 1)) / 2, (size - spacing * (rows - 1)) / 2
    points = tuple(
        (left + spacing * (rank % columns), top + spacing * (rank // columns))
        for rank in range(ranks)
    )
    return Stage(size=size, radius=_radius(spacing, size), points=points, bend=bend)


def _radius(spacing: float, size: float) -> float:
    return max(1.2, min(0.26 * spacing, 0.062 * size))


def _towards(start: Point, goal: Point, distance: float) -> Point:
    length = math.hypot(goal[0] - start[0], goal[1] - start[1]) or 1.0
    share = distance / length
    return start[0] + share * (goal[0] - start[0]), start[1] + share * (goal[1] - start[1])


def _grid_columns(ranks: int, links: set[Link]) -> int:
    """Returns the number of columns of a grid or torus that has all these links, or 0 if there is
    no such grid.

    >>> rows = {(rank, rank // 4 * 4 + (rank + 1) % 4) for rank in range(16)}
    >>> columns = {(rank, (rank + 4) % 16) for rank in range(16)}
    >>> _grid_columns(16, rows | columns), _grid_columns(16, columns)
    (4, 0)
    """
    for columns in sorted(range(3, ranks // 3 + 1), key=lambda c: abs(c - math.sqrt(ranks))):
        rows, rest = divmod(ranks, columns)
        if rest == 0 and _is_grid(rows, columns, links):
            return columns
    return 0


def _is_grid(rows: int, columns: int, links: set[Link]) -> bool:
    across = down = False
    for src, dst in links:
        (y1, x1), (y2, x2) = divmod(src, columns), divmod(dst, columns)
        if y1 == y2 and abs(x1 - x2) in (1, columns - 1):
            across = True
        elif x1 == x2 and abs(y1 - y2) in (1, rows - 1):
            down = True
        elif src != dst:
            return False
    return across and down

"""Grids of ranks, and operations along their axes, for the algorithms with several levels.

Ranks are numbered along axis 0 first. So axis 0 has the ranks of a host, and axis 1 has the hosts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from math import prod

from unisono.algorithms.algorithm_spec import Dims
from unisono.algorithms.cost import BY_PART
from unisono.algorithms.schedule_composition import Composer
from unisono.schedule import Schedule
from unisono.types import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A grid whose points are numbered along axis 0 first.

    >>> grid = Grid(dims=(4, 2))
    >>> grid.coords(5), grid.number((1, 1)), list(grid.lines(1))[0]
    ((1, 1), 5, [0, 4])
    """

    dims: Dims

    @property
    def size(self) -> int:
        """Number of points."""
        return prod(self.dims)

    def coords(self, number: int) -> tuple[int, ...]:
        """Returns the coordinates of a point."""
        found = []
        for size in self.dims:
            number, coord = divmod(number, size)
            found.append(coord)
        return tuple(found)

    def number(self, coords: Sequence[int]) -> int:
        """Returns the point with these coordinates."""
        number = 0
        for coord, size in zip(reversed(coords), reversed(self.dims), strict=True):
            number = number * size + coord
        return number

    def lines(self, axis: int, fixed: Mapping[int, int] | None = None) -> Iterator[list[int]]:
        """Yields the lines of points along an axis. `fixed` gives the coordinates that these lines
        must have on other axes.
        """
        fixed = fixed or {}
        ranges = [
            [0] if a == axis else [fixed[a]] if a in fixed else range(size)
            for a, size in enumerate(self.dims)
        ]
        step = prod(self.dims[:axis])
        for reversed_coords in product(*reversed(ranges)):
            first = self.number(reversed_coords[::-1])
            yield [first + i * step for i in range(self.dims[axis])]

    def points(self, pattern: Sequence[int | None]) -> list[int]:
        """Returns the points with these coordinates, where None matches any coordinate."""
        ranges = [
            range(size) if coord is None else [coord]
            for coord, size in zip(pattern, self.dims, strict=True)
        ]
        return [self.number(found[::-1]) for found in product(*reversed(ranges))]


def near_square(ranks: int, axes: int) -> Dims:
    """Returns sizes of axes, the largest first, that are as equal as possible and whose product is
    the number of ranks.

    The sizes are chosen from the last axis to the first. Each axis gets the largest divisor of the
    remaining product that lets the axes before it be at least as large.

    >>> near_square(16, 2), near_square(8, 2), near_square(7, 2), near_square(24, 3)
    ((4, 4), (4, 2), (7, 1), (4, 3, 2))
    """
    sizes = []
    rest = ranks
    for left in range(axes, 1, -1):
        size = max(d for d in range(1, rest + 1) if rest % d == 0 and d**left <= rest)
        sizes.append(size)
        rest //= size
    return (*sorted([*sizes, rest], reverse=True),)


def powers(base: int, below: int) -> list[int]:
    """Returns the powers of `base` that are less than `below`: 1, base, base^2, and so on.

    >>> powers(3, 10)
    [1, 3, 9]
    """
    found = []
    power = 1
    while power < below:
        found.append(power)
        power *= base
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Builder that adds operations along the lines of a grid to one larger schedule.

    The vector is cut into shares, which form the grid `shares`. Along an axis where the vector is
    not cut, `shares` has size 1. Share s of the grid is share `stride * s + offset` of the
    composer. With `outer_first`, the axes of `shares` are in reverse order. Shares that differ only
    along outer axes are then adjacent and move in one transfer.
    """

    composer: Composer
    grid: Grid
    shares: Grid
    stride: int = 1
    offset: int = 0
    channel: int = 0
    outer_first: bool = False

    def add(
        self,
        axis: int,
        part: Schedule,
        *,
        start: int,
        free: Collection[int],
        fixed: Mapping[int, int] | None = None,
    ) -> int:
        """Adds the schedule `part` for every line along an axis. All lines run in the same rounds.
        Returns the number of the first round after `part`.

        A rank processes the shares whose coordinates are its own. Along the `free` axes, the shares
        may have any coordinate.
        """
        lines = list(self.grid.lines(axis, fixed))
        places = range(len(self.shares.dims))
        axis_at = [places[-1] - place if self.outer_first else place for place in places]
        cuts = self.shares.dims
        free_at = [cuts[place] == 1 or a in free for place, a in enumerate(axis_at)]
        together = sum(1 for _ in takewhile(bool, free_at)) if self.stride == 1 else 0
        run = prod(cuts[:together])
        cut = Grid(dims=(1,) * together + cuts[together:])
        whole = part.collective.op in BY_PART
        shares = []
        for line in lines:
            own = self.grid.coords(line[0])
            pattern: list[int | None] = [
                0 if cut.dims[place] == 1 else None if a in free else own[a]
                for place, a in enumerate(axis_at)
            ]
            pieces = []
            for number in range(1 if whole else len(line)):
                pattern[axis_at.index(axis)] = number
                found = cut.points(pattern)
                pieces.append([self.stride * share + self.offset for share in found])
            shares.append(pieces)
        return self.composer.add(part, lines, shares, start=start, channel=self.channel, run=run)

    def gather(self, order: Sequence[int], parts: Mapping[int, Schedule], *, start: int = 0) -> int:
        """Adds an all-gather along each axis, in the given order. The all-gather along an axis
        extends the result of the previous all-gather."""
        for i, axis in enumerate(order):
            start = self.add(axis, parts[axis], start=start, free=order[:i])
        return start

    def scatter(
        self, order: Sequence[int], parts: Mapping[int, Schedule], *, start: int = 0
    ) -> int:
        """Adds a reduce-scatter along each axis, in the given order. The reduce-scatter along an
        axis cuts the result of the previous reduce-scatter."""
        for i, axis in enumerate(order):
            start = self.add(axis, parts[axis], start=start, free=order[i + 1 :])
        return start


def exchange(composer: Composer, grid: Grid, parts: Mapping[int, Schedule]) -> None:
    """Adds an all-to-all along axis 0, then axis 1, and so on.

    After the all-to-all along an axis, each piece is at a rank with the destination's coordinate
    along this axis.
    """
    start = 0
    for axis in range(len(grid.dims)):
        part = parts[axis]
        assert part.collective.op is Op.ALL_TO_ALL
        lines = list(grid.lines(axis))
        shares = []
        for line in lines:
            own = grid.coords(line[0])
            src: list[int | None] = [None if a < axis else c for a, c in enumerate(own)]
            dst: list[int | None] = [c if a < axis else None for a, c in enumerate(own)]
            pieces = []
            for src[axis], dst[axis] in product(range(len(line)), repeat=2):
                goals = grid.points(dst)
                pieces.append([s * grid.size + d for s in grid.points(src) for d in goals])
            shares.append(pieces)
        start = composer.add(part, lines, shares, start=start)

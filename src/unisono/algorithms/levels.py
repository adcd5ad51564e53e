"""The levels of a hierarchy: how many ranks each has, and which algorithm serves it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from unisono.algorithms.cost import Cost
from unisono.algorithms.grid import Grid, near_square
from unisono.algorithms.registry import build, cost, names
from unisono.algorithms.spec import Dims, Level, check_dims, parse
from unisono.errors import UnsupportedError
from unisono.schedule import Schedule
from unisono.types import Op

_ANY = Level(algorithm="direct")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """Sizes and algorithms of the levels, innermost first.

    >>> Hierarchy.of(8, None, ()).sizes
    (4, 2)
    """

    sizes: Dims
    algorithms: tuple[str, ...]

    @classmethod
    def of(cls, ranks: int, dims: Dims | None, levels: tuple[Level, ...]) -> Hierarchy:
        """Fill in what is not given. Raises `UnsupportedError` if it does not make up the ranks."""
        levels = levels or (_ANY,) * (len(dims) if dims else 2)
        known = [level.size for level in levels if level.size]
        if known:
            rest = ranks // prod(known) if len(known) == len(levels) - 1 else 0
            dims = tuple(level.size or rest for level in levels)
        sizes = dims or near_square(ranks, len(levels))
        if len(sizes) != len(levels) or 0 in sizes:
            raise UnsupportedError(
                f"hierarchical: {len(levels)} levels need a size each, or all but one, whose "
                f"product is {ranks}"
            )
        check_dims(sizes, ranks)
        return cls(sizes=sizes, algorithms=tuple(level.algorithm for level in levels))

    @property
    def grid(self) -> Grid:
        """The ranks as points; axis i is level i."""
        return Grid(dims=self.sizes)

    @property
    def top(self) -> int:
        """The outermost level."""
        return len(self.sizes) - 1

    def part(self, op: Op, level: int, root: int = 0) -> Schedule:
        """What a group of this level does."""
        return build(op, self.algorithms[level], ranks=self.sizes[level], root=root)

    def cost(self, op: Op, level: int) -> Cost:
        """What that costs."""
        return cost(op, self.algorithms[level], ranks=self.sizes[level])

    def serves(self, level: int, *ops: Op) -> bool:
        """Whether the level's algorithm is one of all these operations."""
        text = self.algorithms[level]
        return all(parse(op, text).name in names(op) for op in ops)

    def scatters(self, level: int) -> bool:
        """Whether a level below the top reduces and gathers pieces, rather than the whole vector to
        and from its first rank.

        Raises `UnsupportedError` for an algorithm that can do neither.
        """
        if self.serves(level, Op.REDUCE_SCATTER, Op.ALL_GATHER):
            return True
        if self.serves(level, Op.REDUCE, Op.BROADCAST):
            return False
        raise UnsupportedError(
            f"hierarchical: level {level} must reduce_scatter and all_gather, or reduce and "
            f"broadcast, and {self.algorithms[level]!r} does neither"
        )

"""The levels of a hierarchy: how many ranks each has, and which algorithm serves it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import prod

from unisono.algorithms.compose import on_ranks
from unisono.algorithms.cost import Cost
from unisono.algorithms.grid import Grid, near_square
from unisono.algorithms.host_layout import HostLayout, Hosts
from unisono.algorithms.parameters import Dims, Level, check_dims, parse
from unisono.algorithms.registry import build, cost, names
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
    order: tuple[int, ...]
    """The ranks as they stand in the grid: host by host, where the levels are those of hosts."""

    @classmethod
    def of(
        cls,
        ranks: int,
        dims: Dims | None,
        levels: tuple[Level, ...],
        hosts: Hosts | None = None,
    ) -> Hierarchy:
        """Fill in what is not given: two levels are those of the hosts, if there are several.

        Raises `UnsupportedError` if it does not make up the ranks.
        """
        levels = levels or (_ANY,) * (len(dims) if dims else 2)
        known = [level.size for level in levels if level.size]
        layout = HostLayout.of(ranks, hosts)
        if known:
            rest = ranks // prod(known) if len(known) == len(levels) - 1 else 0
            dims = tuple(level.size or rest for level in levels)
        elif follows_hosts(levels, dims, hosts):
            if not layout.regular:
                sizes = ", ".join(map(str, layout.sizes))
                raise UnsupportedError(
                    f"hierarchical: the hosts have {sizes} ranks, which makes no grid; by_host and "
                    "leaders serve any hosts"
                )
            dims = (layout.sizes[0], len(layout.hosts))
        found = dims or near_square(ranks, len(levels))
        if len(found) != len(levels) or 0 in found:
            raise UnsupportedError(
                f"hierarchical: {len(levels)} levels need a size each, or all but one, whose "
                f"product is {ranks}"
            )
        check_dims(found, ranks)
        like_hosts = layout.regular and found == (layout.sizes[0], len(layout.hosts))
        return cls(
            sizes=found,
            algorithms=tuple(level.algorithm for level in levels),
            order=tuple(chain(*layout.hosts)) if like_hosts else tuple(range(ranks)),
        )

    def place(self, rank: int) -> int:
        """Where a rank stands in the grid."""
        return self.order.index(rank)

    def placed(self, schedule: Schedule) -> Schedule:
        """A schedule of places in the grid as one of ranks."""
        return on_ranks(schedule, self.order)

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


def follows_hosts(levels: tuple[Level, ...], dims: Dims | None, hosts: Hosts | None) -> bool:
    """Whether the levels are the hosts and what is between them: no sizes are said."""
    told = dims is not None or any(level.size for level in levels)
    return hosts is not None and len(hosts) > 1 and len(levels or (_ANY, _ANY)) == 2 and not told

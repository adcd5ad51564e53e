"""The levels of a hierarchy: the number of ranks and the algorithm of each level."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import prod

from unisono.algorithms.algorithm_spec import Dims, Level, check_dims, parse
from unisono.algorithms.cost import Cost
from unisono.algorithms.grid import Grid, near_square
from unisono.algorithms.host_layout import HostLayout, Hosts
from unisono.algorithms.registry import build, cost, names
from unisono.algorithms.schedule_composition import on_ranks
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
    """Ranks in the order of their grid positions. If the levels match the hosts, this order is host
    by host.
    """

    @classmethod
    def of(
        cls,
        ranks: int,
        dims: Dims | None,
        levels: tuple[Level, ...],
        hosts: Hosts | None = None,
    ) -> Hierarchy:
        """Returns the hierarchy, with the missing sizes filled in. If there are several hosts and
        two levels without sizes, level 0 is inside hosts and level 1 is between hosts.

        Raises `UnsupportedError` if the product of the sizes is not the number of ranks.
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
                    f"hierarchical: expected hosts of equal size, got {sizes} ranks; use by_host "
                    "or leaders"
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
        """Returns the position of a rank in the grid."""
        return self.order.index(rank)

    def placed(self, schedule: Schedule) -> Schedule:
        """Converts a schedule of grid positions to a schedule of ranks."""
        return on_ranks(schedule, self.order)

    @property
    def grid(self) -> Grid:
        """Grid of the ranks, in which axis i is level i."""
        return Grid(dims=self.sizes)

    @property
    def top(self) -> int:
        """Number of the outermost level."""
        return len(self.sizes) - 1

    def part(self, op: Op, level: int, root: int = 0) -> Schedule:
        """Returns the schedule of an operation within one group of this level."""
        return build(op, self.algorithms[level], ranks=self.sizes[level], root=root)

    def cost(self, op: Op, level: int) -> Cost:
        """Returns the cost of an operation within one group of this level."""
        return cost(op, self.algorithms[level], ranks=self.sizes[level])

    def serves(self, level: int, *ops: Op) -> bool:
        """Returns true if the level's algorithm supports all these operations."""
        text = self.algorithms[level]
        return all(parse(op, text).name in names(op) for op in ops)

    def scatters(self, level: int) -> bool:
        """Returns true if the level uses reduce-scatter and all-gather.

        Otherwise the level reduces the whole vector to its first rank and broadcasts. Raises
        `UnsupportedError` for an algorithm that supports neither.
        """
        if self.serves(level, Op.REDUCE_SCATTER, Op.ALL_GATHER):
            return True
        if self.serves(level, Op.REDUCE, Op.BROADCAST):
            return False
        raise UnsupportedError(
            f"hierarchical: level {level} must support reduce_scatter and all_gather, or reduce "
            f"and broadcast; {self.algorithms[level]!r} supports neither"
        )


def follows_hosts(levels: tuple[Level, ...], dims: Dims | None, hosts: Hosts | None) -> bool:
    """Returns true if the sizes of the levels follow from the hosts. This is the case for several
    hosts and two levels, if no sizes are given.
    """
    sized = dims is not None or any(level.size for level in levels)
    return hosts is not None and len(hosts) > 1 and len(levels or (_ANY, _ANY)) == 2 and not sized

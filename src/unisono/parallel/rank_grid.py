"""The groups of ranks on each axis of a layout, computed without communication.

The axes and their order are those of torchtitan (`parallel_dims.py`): the last axis varies fastest,
so the ranks that exchange most with each other have adjacent places. The place of a rank is its
number, unless its host is known and another place keeps more of its exchanges within the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from unisono.division import nearest_divisor
from unisono.parallel.host_placement import placed_ranks
from unisono.planner import Layout

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp_depth", "tp_row", "tp_column")
"""The axes of the ranks, the slowest first. The last three axes are the grid of `tp`, which is a
line of columns for 1D `Layout.tensor`, unless ranks hold copies of heads."""
EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep")
"""The axes of the ranks for experts. Ranks that differ along `ep` hold different experts; ranks
that differ along `edp` hold the same experts and see different tokens."""
_TOKENS = ("dp_replicate", "dp_shard", "cp")
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pp": ("pp",),
        "tp": ("tp_depth", "tp_row", "tp_column"),
        "cp": ("cp",),
        "dp": ("dp_replicate", "dp_shard"),
        "ep": ("ep",),
        "dp_replicate": ("dp_replicate",),
        "dp_shard": ("dp_shard",),
        "shard": ("dp_shard", "cp"),
        "tokens": _TOKENS,
        "world": AXES,
        "expert_tokens": ("dp_replicate", "edp"),
        "expert_shard": ("edp",),
        "stage": AXES[1:],
        "tp_depth": ("tp_depth",),
        "tp_row": ("tp_row",),
        "tp_column": ("tp_column",),
        "depth_tokens": (*_TOKENS, "tp_depth"),
        "row_tokens": (*_TOKENS, "tp_depth", "tp_row"),
        "column_tokens": (*_TOKENS, "tp_depth", "tp_column"),
        "own": (),
    }
)
"""The names of the groups of ranks, and the axes along which the ranks of a group differ.

`shard`, `expert_shard`: ranks over which ZeRO divides parameters. `tokens`: ranks that see
different tokens, and sum the gradients of dense parameters. `expert_tokens`: ranks that sum the
gradients of an expert. `stage`: ranks of a pipeline stage. `depth_tokens`, `row_tokens`,
`column_tokens`: ranks that see different tokens if tensor parallelism also divides samples: over
the depth of its grid, over depth and rows, or over depth and columns. `own`: a single rank, for
blocks that only one rank holds and whose whole gradient it computes."""


class RankGrid:
    """The coordinates and groups of all ranks of a layout.

    >>> grid = RankGrid(Layout(dp=2, tp=2, pp=2))
    >>> grid.group(5, "tp"), grid.group(5, "dp"), grid.group(5, "pp")
    ((4, 5), (5, 7), (1, 5))
    """

    def __init__(
        self,
        layout: Layout,
        *,
        head_copies: int = 1,
        hosts: Sequence[Sequence[int]] = (),
    ) -> None:
        """`head_copies`: number of adjacent ranks of a 1D `tp` that hold the same heads of keys and
        values. These ranks are a row of the grid of `tp`: they differ along `tp_column`. `hosts`:
        the ranks of each host, to place ranks by; empty to place each rank by its number.

        Raises `ValueError` if `ep` is not a divisor of dp / dp_replicate x cp x tp.
        """
        shards = layout.dp // layout.dp_replicate
        replica = shards * layout.cp * layout.tp
        if replica % layout.ep:
            near = nearest_divisor(replica, layout.ep)
            raise ValueError(
                f"ep must divide dp / dp_replicate x cp x tp: {layout.ep} does not divide "
                f"{shards} x {layout.cp} x {layout.tp} = {replica}; "
                f"{near} does"
            )
        self.layout = layout
        self.sizes: Mapping[str, int] = MappingProxyType(
            {
                "pp": layout.pp,
                "dp_replicate": layout.dp_replicate,
                "dp_shard": shards,
                "cp": layout.cp,
                **_grid_sizes(layout, head_copies),
                "edp": replica // layout.ep,
                "ep": layout.ep,
            }
        )
        """Number of ranks along each axis."""
        self.placed = placed_ranks(_blocks(layout), hosts or [range(layout.devices)])
        """The rank at each place of the layout."""
        self._place_of = {rank: place for place, rank in enumerate(self.placed)}
        self._groups = {name: self.divided(axes) for name, axes in GROUPS.items()}

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.layout.devices

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the coordinate of a rank along each axis, and its number in its `tp` group.

        Raises `ValueError` for a rank that does not exist.

        >>> RankGrid(Layout(dp=2, tp=2)).coordinates(3)["dp_shard"]
        1
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"expected a rank from 0 to {self.size - 1}, got {rank}")
        found: dict[str, int] = {}
        place = self._place_of[rank]
        for axes in (AXES, EXPERT_AXES):
            along = np.unravel_index(place, self._shape(axes))
            found |= {axis: int(each) for axis, each in zip(axes, along, strict=True)}
        return found | {"tp": place % self.layout.tp}

    def group(self, rank: int, name: str) -> tuple[int, ...]:
        """Returns the ranks of the group `name` of `GROUPS` that contains `rank`, in the order of
        their coordinates."""
        return next(group for group in self.groups(name) if rank in group)

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Returns all groups of this name. Each rank is in exactly one group.

        >>> RankGrid(Layout(dp=2, tp=2)).groups("dp")
        ((0, 2), (1, 3))
        """
        if name not in GROUPS:
            raise ValueError(f"no group {name!r}: expected one of {', '.join(GROUPS)}")
        return self._groups[name]

    def divided(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns the groups of ranks whose coordinates differ on these axes only."""
        view = EXPERT_AXES if set(axes) <= set(EXPERT_AXES) else AXES
        kept = [place for place, axis in enumerate(view) if axis not in axes]
        moved = [view.index(axis) for axis in axes]
        ranks = np.array(self.placed).reshape(self._shape(view)).transpose(*kept, *moved)
        return tuple(map(tuple, ranks.reshape(-1, math.prod(self._shape(axes))).tolist()))

    def _shape(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.sizes[axis] for axis in axes)


def _blocks(layout: Layout) -> list[int]:
    """Returns the numbers of consecutive places that exchange the most data, the most first."""
    found = [layout.tp, layout.tp * layout.cp]
    if layout.ep % layout.tp == 0 and (found[1] % layout.ep == 0 or layout.ep % found[1] == 0):
        found.append(layout.ep)  # else it has no place between the others
    replica = layout.dp // layout.dp_replicate * found[1]
    return sorted({*found, replica, layout.dp * found[1]})


def _grid_sizes(layout: Layout, head_copies: int) -> dict[str, int]:
    if head_copies > 1:
        return {"tp_depth": 1, "tp_row": layout.tp // head_copies, "tp_column": head_copies}
    return {f"tp_{name}": size for name, size in layout.tensor_grid._asdict().items()}

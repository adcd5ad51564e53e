"""The ranks of each axis of a layout, compared with coordinates that are computed rank by rank."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.parallel.rank_grid import AXES, EXPERT_AXES, GROUPS, RankGrid
from unisono.planner import Layout

sizes = st.integers(1, 4)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    replicate, shard, cp, tp, pp = (draw(sizes) for _ in range(5))
    replica = shard * cp * tp
    ep = draw(st.sampled_from([d for d in range(1, replica + 1) if replica % d == 0]))
    return Layout(dp=replicate * shard, dp_replicate=replicate, cp=cp, tp=tp, pp=pp, ep=ep)


def place(rank: int, axes: tuple[str, ...], grid: RankGrid) -> dict[str, int]:
    """Computes a rank's coordinates by division; the last axis varies fastest."""
    found = {}
    for axis in reversed(axes):
        rank, found[axis] = divmod(rank, grid.sizes[axis])
    return found


@given(layouts())
def test_coordinates_are_digits_of_the_rank(layout: Layout) -> None:
    grid = RankGrid(layout)
    for rank in range(grid.size):
        expected = place(rank, AXES, grid) | place(rank, EXPERT_AXES, grid)
        assert grid.coordinates(rank) == expected | {"tp": rank % layout.tp}


@given(layouts(), st.sampled_from(list(GROUPS)))
def test_ranks_of_a_group_differ_along_its_axes_only(layout: Layout, name: str) -> None:
    grid = RankGrid(layout)
    axes = GROUPS[name]
    view = EXPERT_AXES if set(axes) <= set(EXPERT_AXES) else AXES
    fixed = [axis for axis in view if axis not in axes]
    places = [place(rank, view, grid) for rank in range(grid.size)]
    for rank in range(grid.size):
        expected = tuple(
            other
            for other in range(grid.size)
            if all(places[other][axis] == places[rank][axis] for axis in fixed)
        )
        assert grid.group(rank, name) == expected
    assert sorted(sum(grid.groups(name), ())) == list(range(grid.size))


@given(layouts())
def test_experts_stay_inside_a_stage_and_a_replica(layout: Layout) -> None:
    grid = RankGrid(layout)
    for group in grid.groups("ep"):
        found = [grid.coordinates(rank) for rank in group]
        assert len({(each["pp"], each["dp_replicate"]) for each in found}) == 1
    copies = math.prod(grid.sizes[axis] for axis in GROUPS["expert_tokens"])
    assert copies * layout.ep * layout.pp == grid.size


def test_tensor_parallel_ranks_are_neighbours() -> None:
    grid = RankGrid(Layout(dp=2, tp=2, pp=2))
    assert grid.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grid.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_experts_over_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 does not divide 2 x 1 x 1 = 2; 2 does"):
        RankGrid(Layout(dp=4, dp_replicate=2, ep=4))


def test_unknown_ranks_and_groups_are_refused() -> None:
    grid = RankGrid(Layout(dp=2))
    with pytest.raises(ValueError, match="a rank from 0 to 1, got 2"):
        grid.coordinates(2)
    with pytest.raises(ValueError, match="no group 'xp': expected one of pp, tp"):
        grid.groups("xp")

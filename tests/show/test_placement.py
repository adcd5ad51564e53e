from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.show.placement import Arrangement, Stage


def ends(path: str) -> tuple[tuple[float, float], tuple[float, float]]:
    found = [float(value) for value in re.findall(r"-?\d+(?:\.\d+)?", path)]
    return (found[0], found[1]), (found[-2], found[-1])


@given(
    ranks=st.integers(2, 128),
    shape=st.sampled_from([Arrangement.CIRCLE, Arrangement.GRID, Arrangement.LINE]),
    data=st.data(),
)
def test_arrows_connect_the_discs_of_ranks(
    ranks: int, shape: Arrangement, data: st.DataObject
) -> None:
    stage = Stage.of(ranks, [], size=500, shape=shape)
    src, dst = data.draw(st.lists(st.integers(0, ranks - 1), min_size=2, max_size=2, unique=True))
    forward, backward = stage.arrow(src, dst), stage.arrow(dst, src)
    start, end = ends(forward.path)
    length = math.dist(stage.points[src], stage.points[dst])
    gap = min(stage.radius, 0.4 * length) - 0.2
    assert gap <= math.dist(start, stage.points[src]) <= stage.radius + 3
    assert gap <= math.dist(end, stage.points[dst]) <= stage.radius + 3
    assert forward.path != backward.path
    assert math.dist(forward.tip[:2], end) < 0.2


@pytest.mark.parametrize("shape", list(Arrangement))
@pytest.mark.parametrize("ranks", [1, 2, 5, 16, 128])
def test_discs_are_inside_the_square_and_do_not_touch(ranks: int, shape: Arrangement) -> None:
    stage = Stage.of(ranks, [], size=300, shape=shape)
    assert len(stage.points) == ranks
    for x, y in stage.points:
        assert stage.radius < min(x, y) and max(x, y) < 300 - stage.radius
    for one, other in zip(stage.points, stage.points[1:], strict=False):
        assert math.dist(one, other) > 1.5 * stage.radius


def test_a_torus_is_drawn_as_a_grid_and_a_ring_is_not() -> None:
    across = {(r, r // 4 * 4 + (r + 1) % 4) for r in range(12)}
    down = {(r, (r + 4) % 12) for r in range(12)}
    grid = Stage.of(12, across | down, size=300)
    assert len({x for x, _ in grid.points}) == 4 and len({y for _, y in grid.points}) == 3
    ring = Stage.of(12, {(r, (r + 1) % 12) for r in range(12)}, size=300)
    assert all(math.isclose(math.dist(point, (150, 150)), 120) for point in ring.points)

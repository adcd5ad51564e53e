"""The order of ranks on hosts, compared with all orders."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.parallel.host_placement import placed_ranks
from unisono.parallel.rank_grid import GROUPS, RankGrid
from unisono.planner import Layout


@st.composite
def cases(draw: st.DrawFn, most: int = 6) -> tuple[list[int], list[list[int]]]:
    """Draws sizes of blocks that divide each other, and the ranks of each host."""
    sizes = [draw(st.integers(1, 3))]
    while sizes[-1] * 2 <= most and draw(st.booleans()):
        sizes.append(sizes[-1] * draw(st.integers(2, most // sizes[-1])))
    count = sizes[-1] * draw(st.integers(1, most // sizes[-1]))
    numbers = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    hosts = [[r for r in range(count) if numbers[r] == host] for host in range(3)]
    return sizes, [host for host in hosts if host]


def divided(order: tuple[int, ...], sizes: list[int], hosts: list[list[int]]) -> list[int]:
    """Counts the blocks of each size whose ranks are on several hosts."""
    return [
        sum(
            not any(set(order[first : first + size]) <= set(host) for host in hosts)
            for first in range(0, len(order), size)
        )
        for size in sizes
    ]


@given(cases())
@settings(deadline=None, max_examples=60)
def test_no_other_order_divides_fewer_blocks(case: tuple[list[int], list[list[int]]]) -> None:
    sizes, hosts = case
    found = placed_ranks(sizes, hosts)
    count = sum(map(len, hosts))
    assert sorted(found) == list(range(count))
    least = min(divided(order, sizes, hosts) for order in itertools.permutations(range(count)))
    assert divided(found, sizes, hosts) == least
    if divided(tuple(range(count)), sizes, hosts) == least:
        assert found == tuple(range(count))


def test_ranks_of_interleaved_hosts() -> None:
    grid = RankGrid(Layout(dp=2, tp=2, pp=2), hosts=[[0, 2, 4, 6], [1, 3, 5, 7]])
    assert grid.groups("tp") == ((0, 2), (4, 6), (1, 3), (5, 7))
    assert grid.groups("dp") == ((0, 4), (2, 6), (1, 5), (3, 7))
    assert grid.groups("pp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grid.coordinates(3) == RankGrid(Layout(dp=2, tp=2, pp=2)).coordinates(5)


def test_experts_and_sequences_stay_on_hosts() -> None:
    hosts = [[0, 3, 5, 6], [1, 2, 4, 7]]
    for layout in (Layout(dp=8, ep=4), Layout(dp=2, cp=4), Layout(dp=2, cp=2, tp=2, ep=4)):
        grid = RankGrid(layout, hosts=hosts)
        for name in ("tp", "cp", "ep"):
            assert all(set(each) <= set(hosts[0]) or set(each) <= set(hosts[1])
                       for each in grid.groups(name)), (layout, name)  # fmt: skip


def test_hosts_of_unequal_sizes() -> None:
    grid = RankGrid(Layout(dp=4, tp=2), hosts=[[0, 1, 2], [3, 4, 5, 6, 7]])
    # three of the four pairs are on one host, which no order exceeds
    assert sum(set(each) <= {0, 1, 2} or set(each) <= {3, 4, 5, 6, 7}
               for each in grid.groups("tp")) == 3  # fmt: skip


@given(cases(8), st.sampled_from(list(GROUPS)))
@settings(deadline=None)
def test_groups_follow_the_coordinates(case: tuple[list[int], list[list[int]]], name: str) -> None:
    """Placed ranks have the groups of ranks in order, by their places."""
    _, hosts = case
    layout = Layout(dp=sum(map(len, hosts)))
    placed, plain = RankGrid(layout, hosts=hosts), RankGrid(layout)
    for place, rank in enumerate(placed.placed):
        assert placed.coordinates(rank) == plain.coordinates(place)
        expected = tuple(placed.placed[other] for other in plain.group(place, name))
        assert placed.group(rank, name) == expected

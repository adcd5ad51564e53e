"""Properties of each algorithm family: the links, the order and the sizes of its messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from unisono.algorithms import build
from unisono.algorithms.grid import Grid
from unisono.algorithms.multi_ring import disjoint_rings
from unisono.schedule import Schedule


def links(schedule: Schedule) -> set[tuple[int, int]]:
    return {(t.src, t.dst) for t in schedule.transfers}


def busiest(schedule: Schedule, *, sending: bool) -> int:
    """Returns the largest number of messages that a rank sends (or receives) in a round."""
    return max(
        max(Counter(t.src if sending else t.dst for t in transfers).values())
        for _, transfers in schedule.rounds()
    )


def neighbours(ranks: int) -> set[tuple[int, int]]:
    up = {(rank, (rank + 1) % ranks) for rank in range(ranks)}
    return up | {(b, a) for a, b in up}


def test_a_ring_sends_only_to_neighbours() -> None:
    for op in ("all_reduce", "reduce_scatter", "all_gather"):
        for t in build(op, "ring", ranks=6).transfers:
            assert t.dst == (t.src + 1) % 6


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_bidirectional_ring_uses_both_directions(op: str) -> None:
    schedule = build(op, "bidirectional_ring", ranks=7)
    assert links(schedule) == neighbours(7)
    for _, transfers in schedule.rounds():
        assert len({(t.src, t.dst) for t in transfers}) == 14, "all links are busy in all rounds"


@pytest.mark.parametrize("ranks", range(5, 30))
def test_double_rings_share_no_link(ranks: int) -> None:
    rings = disjoint_rings(ranks)
    edges = []
    for order in rings:
        assert sorted(order) == list(range(ranks))
        edges.append({frozenset(e) for e in zip(order, order[1:] + order[:1], strict=True)})
    assert not edges[0] & edges[1]


@pytest.mark.parametrize("ranks", [3, 4, 6, 8])
def test_the_channels_of_a_double_ring_share_no_direction_of_a_link(ranks: int) -> None:
    schedule = build("all_reduce", "double_ring", ranks=ranks)
    used = [{(t.src, t.dst) for t in schedule.transfers if t.channel == c} for c in (0, 1)]
    assert len(used[0]) == len(used[1]) == ranks
    assert not used[0] & used[1]


def test_channels_carry_equal_shares() -> None:
    schedule = build("all_reduce", "ring:channels=4", ranks=3)
    moved = Counter(t.channel for t in schedule.transfers for _ in range(t.count))
    assert set(moved) == {0, 1, 2, 3}
    assert len(set(moved.values())) == 1
    assert schedule.num_rounds == build("all_reduce", "ring", ranks=3).num_rounds


@pytest.mark.parametrize("name", ["torus_rings:4x3", "bucket:4x3"])
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_torus_algorithm_uses_the_links_of_the_torus(name: str, op: str) -> None:
    grid = Grid(dims=(4, 3))
    for src, dst in links(build(op, name, ranks=12)):
        pairs = zip(grid.coords(src), grid.coords(dst), grid.dims, strict=True)
        assert sorted(min((a - b) % size, (b - a) % size) for a, b, size in pairs) == [0, 1]


def test_torus_rings_use_every_link_in_both_directions() -> None:
    schedule = build("all_reduce", "torus_rings:4x3", ranks=12)
    for _, transfers in schedule.rounds():
        assert len({(t.src, t.dst) for t in transfers}) == 4 * 12


def test_shards_of_a_bucket_never_share_a_link() -> None:
    for ways in (1, 2):
        schedule = build("all_reduce", f"bucket:3x3x3,ways={ways}", ranks=27)
        for _, transfers in schedule.rounds():
            carried = Counter(link for link, _ in {((t.src, t.dst), t.channel) for t in transfers})
            assert set(carried.values()) == {1}
            assert len(carried) == ways * 3 * 27


def test_pairwise_sends_and_receives_one_piece_a_round() -> None:
    for op in ("reduce_scatter", "all_gather", "all_to_all"):
        for _, transfers in build(op, "pairwise", ranks=5).rounds():
            assert sorted(t.src for t in transfers) == list(range(5))
            assert sorted(t.dst for t in transfers) == list(range(5))


@pytest.mark.parametrize("ranks", [2, 6, 8])
def test_neighbour_exchange_uses_pairs_of_neighbours(ranks: int) -> None:
    schedule = build("all_gather", "neighbour_exchange", ranks=ranks)
    for _, transfers in schedule.rounds():
        pairs = {(t.src, t.dst) for t in transfers}
        assert pairs <= neighbours(ranks)
        assert pairs == {(b, a) for a, b in pairs}
        assert len(pairs) == ranks


def test_halving_doubling_halves_then_doubles_its_messages() -> None:
    schedule = build("all_reduce", "halving_doubling", ranks=8)
    seen = [(abs(ts[0].src - ts[0].dst), ts[0].count) for _, ts in schedule.rounds()]
    assert seen == [(4, 4), (2, 2), (1, 1), (1, 1), (2, 2), (4, 4)]


def test_swing_distances_are_shorter_than_doubling() -> None:
    distances = []
    for _, transfers in build("reduce_scatter", "swing", ranks=16).rounds():
        apart = {min((t.dst - t.src) % 16, (t.src - t.dst) % 16) for t in transfers}
        assert len(apart) == 1
        distances.append(apart.pop())
        assert {(t.src, t.dst) for t in transfers} == {(t.dst, t.src) for t in transfers}
    assert distances == [1, 1, 3, 5]
    assert sum(distances) < 1 + 2 + 4 + 8


def test_swing_on_a_torus_alternates_between_the_axes() -> None:
    grid = Grid(dims=(4, 4))
    axes = []
    for _, transfers in build("reduce_scatter", "swing:4x4", ranks=16).rounds():
        moved = {
            axis
            for t in transfers
            for axis in (0, 1)
            if grid.coords(t.src)[axis] != grid.coords(t.dst)[axis]
        }
        assert len(moved) == 1
        axes.append(moved.pop())
    assert axes == [0, 1, 0, 1]


def sizes(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Yields for each round the distance from sender to receiver, in ranks, and the largest number
    of chunks that a rank sends.
    """
    ranks = schedule.collective.ranks
    for _, transfers in schedule.rounds():
        largest: Counter[int] = Counter()
        for t in transfers:
            largest[t.src] += t.count
        yield (transfers[0].dst - transfers[0].src) % ranks, max(largest.values())


def test_nhr_sends_few_chunks_far_and_many_near() -> None:
    assert list(sizes(build("all_gather", "nhr", ranks=16))) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert list(sizes(build("all_gather", "nhr", ranks=6))) == [(4, 1), (2, 1), (1, 3)]


@pytest.mark.parametrize("aggregation", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [8, 11, 16])
def test_pat_limits_its_messages(ranks: int, aggregation: int) -> None:
    schedule = build("all_gather", f"pat:{aggregation}", ranks=ranks)
    assert max(count for _, count in sizes(schedule)) <= aggregation


def test_pat_is_logarithmic_with_a_large_limit_and_linear_with_a_small_one() -> None:
    assert build("all_gather", "pat:8", ranks=16).num_rounds == 4
    assert build("all_gather", "pat:2", ranks=16).num_rounds == 1 + 7
    assert build("all_gather", "pat:1", ranks=16).num_rounds == 15


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 13, 16])
def test_double_binary_trees_send_and_receive_one_message_a_round(ranks: int) -> None:
    for op in ("broadcast", "reduce"):
        schedule = build(op, "double_binary_tree", ranks=ranks, root=1)
        assert busiest(schedule, sending=True) == busiest(schedule, sending=False) == 1
    schedule = build("all_reduce", "double_binary_tree", ranks=ranks)
    assert busiest(schedule, sending=True) <= 2
    assert busiest(schedule, sending=False) <= 2


@pytest.mark.parametrize("ranks", range(2, 40))
def test_an_inner_rank_of_one_binary_tree_is_a_leaf_of_the_other(ranks: int) -> None:
    transfers = build("broadcast", "double_binary_tree:1", ranks=ranks).transfers
    inner = [{t.src for t in transfers if t.channel == tree} - {0} for tree in (0, 1)]
    assert not inner[0] & inner[1]
    for tree in (0, 1):
        assert sorted(t.dst for t in transfers if t.channel == tree) == list(range(1, ranks))


def test_a_k_nomial_tree_with_as_many_children_as_ranks_is_flat() -> None:
    flat = build("broadcast", "k_nomial:6", ranks=6, root=2)
    assert links(flat) == links(build("broadcast", "direct", ranks=6, root=2))
    assert flat.num_rounds == 1


def between_hosts(schedule: Schedule, ranks_of_a_host: int) -> int:
    """Returns the number of chunks that ranks send to other hosts."""
    return sum(
        t.count for t in schedule.transfers if t.src // ranks_of_a_host != t.dst // ranks_of_a_host
    )


def test_a_hierarchy_sends_less_between_hosts() -> None:
    flat = build("all_reduce", "direct", ranks=8)
    levels = build("all_reduce", "level0:mesh@4;level1:mesh@2", ranks=8)
    assert flat.collective.parts == levels.collective.parts == 8
    assert between_hosts(levels, 4) * 4 == between_hosts(flat, 4)
    for op in ("broadcast", "reduce"):
        assert between_hosts(build(op, "hierarchical:4x2", ranks=8, root=5), 4) == 1


def test_a_level_of_trees_uses_leaders() -> None:
    schedule = build("all_reduce", "level0:binomial_tree@4;level1:ring@2", ranks=8)
    crossing = {link for link in links(schedule) if link[0] // 4 != link[1] // 4}
    assert crossing == {(0, 4), (4, 0)}


def test_level_sizes_may_be_given_outside_the_name() -> None:
    separate = build("all_reduce", "level0:mesh;level1:ring", ranks=8, levels=(2, 4))
    written = build("all_reduce", "level0:mesh@2;level1:ring@4", ranks=8)
    assert separate.transfers == written.transfers
    default = build("all_reduce", "level0:mesh;level1:ring", ranks=8)
    assert links(default) == links(build("all_reduce", "level0:mesh@4;level1:ring", ranks=8))


def test_blueconnect_is_a_hierarchy_of_rings() -> None:
    rings = build("all_gather", "level0:ring@4;level1:ring@3", ranks=12)
    assert build("all_gather", "blueconnect:4x3", ranks=12).transfers == rings.transfers


def test_a_barrier_has_no_transfers() -> None:
    assert len(build("barrier", "direct", ranks=5).transfers) == 0

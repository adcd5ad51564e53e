"""Tests of sweeps and searches against times from formulas."""

from __future__ import annotations

import pytest

from unisono import topology
from unisono.simulator import compare
from unisono.simulator.search import AS_NUMBERED, search
from unisono.simulator.sweep import changed, scale_factor, sweep


def times(spec: str, name: str, *values: str, op: str = "all_reduce") -> list[float]:
    points = sweep(op, spec, name, values, 1e9, names=["ring"])
    assert all(point.best is not None and point.best.result is not None for point in points)
    return [p.best.result.time_s for p in points if p.best and p.best.result]


def test_ring_time_grows_with_the_number_of_hosts() -> None:
    found = times("star:16,bandwidth=10GB,latency=0ns", "hosts", "2", "4", "16")
    assert found == pytest.approx([2 * (n - 1) / n * 0.1 for n in (2, 4, 16)])


def test_ring_time_is_inverse_to_bandwidth() -> None:
    found = times("ring:4,latency=0ns", "bandwidth", "10GB", "40GB", "80Gbit")
    assert found == pytest.approx([0.15, 0.15 / 4, 0.15])


def test_all_to_all_time_grows_with_oversubscription() -> None:
    points = sweep(
        "all_to_all",
        "leaf_spine:leaves=2,spines=4,hosts=4,latency=0ns",
        "oversubscription",
        ["1", "2", "4"],
        1e9,
        names=["direct"],
    )
    one, two, four = (p.best.result.time_s for p in points if p.best and p.best.result)
    assert one < two < four
    assert four == pytest.approx(2 * two, rel=0.01)


@pytest.mark.parametrize(
    ("spec", "name", "value", "ranks"),
    [
        ("fat_tree:4", "radix", "8", 128),
        ("torus:4x4", "sizes", "2x2x2", 8),
        ("dgx:8/star:32", "hosts", "2", 16),
        ("dgx:8/fat_tree:k=4", "ranks", "5", 5),
        ("dgx:8/fat_tree:k=4,levels=2", "k", "8", 32),
        ("leaf_spine:leaves=2,spines=1,hosts=4", "hosts", "8", 16),
        ("star:4", "ranks", "9", 9),
    ],
)
def test_parameters_of_a_spec_can_be_varied(spec: str, name: str, value: str, ranks: int) -> None:
    assert changed(spec, name, value)[1] == ranks


@pytest.mark.parametrize(
    ("spec", "name", "value", "match"),
    [
        ("ring:8", "oversubscription", "2", "unknown option oversubscription"),
        ("fat_tree:4", "hosts", "17", "has 1 to 16 hosts"),
        ("fat_tree:4", "hosts", "two", "has 1 to 16 hosts"),
        ("net.json", "bandwidth", "1GB", "only ranks or hosts of a file"),
        ("star:8", "bandwidth", "fast", "expected a rate such as"),
    ],
)
def test_invalid_variations_are_refused(spec: str, name: str, value: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        changed(spec, name, value)


def test_scale_factor_equals_throughput_over_ideal_throughput() -> None:
    # Eight ranks process 8 batches in 40 ms; one rank processes 1 batch in 30 ms.
    assert scale_factor(30e-3, 10e-3) == pytest.approx((8 / 40e-3) / (8 * (1 / 30e-3)))


def test_a_search_is_at_least_as_good_as_a_comparison() -> None:
    net = topology.torus([4, 2])
    comparison = compare("all_reduce", net, 1e6)
    done = search("all_reduce", net, 1e6)
    assert comparison[0].result is not None
    assert done.found[0].time_s <= comparison[0].result.time_s
    assert done.pruned > 0
    assert done.simulated > len(done.found)
    names = {found.base for found in done.found}
    fitting = {entry.algorithm for entry in comparison if entry.result is not None}
    assert names <= fitting
    # The comparison shows that the excluded algorithms take longer than the best algorithm.
    slow = [e.result.time_s for e in comparison if e.result and e.algorithm not in names]
    assert all(time_s > done.found[0].time_s for time_s in slow)


def test_a_search_improves_a_bad_rank_order() -> None:
    grid = topology.grid([8, 2])
    done = search("all_reduce", grid, 8e3, names=["ring"], channels=[1])
    best = done.found[0]
    plain = compare("all_reduce", grid, 8e3, names=["ring"])[0]
    assert plain.result is not None
    assert best.order != AS_NUMBERED
    assert best.placement is not None
    assert sorted(best.placement) == list(range(16))
    assert best.time_s < plain.result.time_s


def test_a_search_without_budget_still_has_a_result() -> None:
    done = search("all_reduce", topology.ring(8), 1e6, budget_s=0.0)
    assert done.simulated == 1
    assert done.late > 0
    with pytest.raises(ValueError, match="powers of two"):
        search("all_reduce", topology.ring(6), 1e6, names=["swing:dims=6"])

from __future__ import annotations

from fractions import Fraction

import pytest

from unisono.algorithms import Cost, build, cost, find, names, registry, ring
from unisono.errors import UnsupportedError
from unisono.schedule import Schedule
from unisono.types import Op


def test_names_lists_the_algorithms_of_each_operation() -> None:
    assert {op.value: names(op) for op in Op} == {
        "all_reduce": (
            "bidirectional_ring",
            "blueconnect",
            "bucket",
            "by_host",
            "chain",
            "direct",
            "double_binary_tree",
            "double_ring",
            "halving_doubling",
            "hierarchical",
            "hypercube",
            "leaders",
            "nhr",
            "one_shot",
            "rank_order",
            "recursive_doubling",
            "reduce_broadcast",
            "reduce_scatter_all_gather",
            "ring",
            "swing",
            "torus_rings",
        ),
        "reduce_scatter": (
            "bidirectional_ring",
            "blueconnect",
            "bruck",
            "bucket",
            "by_host",
            "direct",
            "double_ring",
            "hierarchical",
            "hypercube",
            "leaders",
            "neighbour_exchange",
            "nhr",
            "pairwise",
            "pat",
            "recursive_halving",
            "reduce_and_scatter",
            "ring",
            "swing",
            "torus_rings",
        ),
        "all_gather": (
            "bidirectional_ring",
            "blueconnect",
            "bruck",
            "bucket",
            "by_host",
            "direct",
            "double_ring",
            "gather_broadcast",
            "hierarchical",
            "hypercube",
            "leaders",
            "neighbour_exchange",
            "nhr",
            "pairwise",
            "pat",
            "recursive_doubling",
            "ring",
            "swing",
            "torus_rings",
        ),
        "all_to_all": (
            "bruck",
            "by_host",
            "direct",
            "hierarchical",
            "hypercube",
            "leaders",
            "pairwise",
        ),
        "broadcast": (
            "binomial_tree",
            "by_host",
            "chain",
            "direct",
            "double_binary_tree",
            "hierarchical",
            "k_nomial",
            "leaders",
            "scatter_all_gather",
        ),
        "reduce": (
            "binomial_tree",
            "by_host",
            "chain",
            "direct",
            "double_binary_tree",
            "hierarchical",
            "k_nomial",
            "leaders",
            "reduce_scatter_gather",
        ),
        "gather": ("binomial_tree", "chain", "direct", "hierarchical", "k_nomial", "leaders"),
        "scatter": ("binomial_tree", "chain", "direct", "hierarchical", "k_nomial", "leaders"),
        "barrier": ("direct",),
        "scan": ("by_host", "chain", "direct", "recursive_doubling"),
        "exscan": ("by_host", "chain", "direct", "recursive_doubling"),
    }


def test_an_operation_is_named_by_text_or_value() -> None:
    assert build("reduce", "direct", ranks=3, root=1) == build(Op.REDUCE, "direct", ranks=3, root=1)
    assert names("reduce") == names(Op.REDUCE)


def test_operations_without_a_root_ignore_the_root() -> None:
    assert build("all_reduce", "ring", ranks=3, root=7) == build("all_reduce", "ring", ranks=3)


def test_the_error_for_an_unknown_algorithm_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="'tree'; expected one of bidirectional_ring, "):
        build("reduce_scatter", "tree", ranks=4)


def test_the_error_for_an_unknown_operation_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="'allreduce'; expected one of all_reduce, "):
        build("allreduce", "ring", ranks=4)
    with pytest.raises(UnsupportedError, match="unknown operation 'sum'"):
        names("sum")


@pytest.mark.parametrize("ranks", [0, -1, 1 << 20])
def test_an_invalid_number_of_ranks_is_rejected(ranks: int) -> None:
    with pytest.raises(UnsupportedError, match=f"ranks, got {ranks}"):
        build("all_reduce", "ring", ranks=ranks)


@pytest.mark.parametrize("root", [-1, 4])
def test_an_invalid_root_is_rejected(root: int) -> None:
    with pytest.raises(UnsupportedError, match=f"expected a root in 0..3, got {root}"):
        build("broadcast", "direct", ranks=4, root=root)


def test_adding_an_algorithm_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry._ALGORITHMS))

    def stated(ranks: int, *, hops: int = 1) -> Cost:
        return Cost(rounds=hops, bytes_sent=Fraction(ranks))

    @registry.algorithm(Op.ALL_GATHER, "walk", cost=stated)
    def walk(ranks: int, *, hops: int = 1) -> Schedule:
        return ring.all_gather(ranks)

    assert "walk" in names("all_gather")
    assert build("all_gather", "walk:3", ranks=4).transfers == walk(4).transfers
    assert cost("all_gather", "walk:hops=3", ranks=4).rounds == 3
    assert [(p.name, p.default) for p in find("all_gather", "walk").parameters] == [("hops", 1)]


def test_a_single_rank_has_no_transfers() -> None:
    for op in Op:
        for name in names(op):
            assert cost(op, name, ranks=1) == Cost(rounds=0, bytes_sent=Fraction(0))
            assert not build(op, name, ranks=1).transfers

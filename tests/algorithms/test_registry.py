from __future__ import annotations

import pytest

from unisono.algorithms import build, names
from unisono.errors import UnsupportedError
from unisono.types import Op


def test_names_by_operation() -> None:
    assert {op.value: names(op) for op in Op} == {
        "all_reduce": ("direct", "one_shot", "recursive_doubling", "ring"),
        "reduce_scatter": ("direct", "pairwise", "ring"),
        "all_gather": ("direct", "recursive_doubling", "ring"),
        "all_to_all": ("direct", "pairwise"),
        "broadcast": ("binomial_tree", "chain", "direct", "scatter_all_gather"),
        "reduce": ("binomial_tree", "direct", "reduce_scatter_gather"),
        "gather": ("binomial_tree", "direct"),
        "scatter": ("binomial_tree", "direct"),
        "barrier": ("direct",),
        "scan": ("chain", "direct", "recursive_doubling"),
        "exscan": ("chain", "direct", "recursive_doubling"),
    }


def test_an_operation_is_named_by_text_or_value() -> None:
    assert build("reduce", "direct", ranks=3, root=1) == build(Op.REDUCE, "direct", ranks=3, root=1)
    assert names("reduce") == names(Op.REDUCE)


def test_the_root_is_ignored_where_there_is_none() -> None:
    assert build("all_reduce", "ring", ranks=3, root=7) == build("all_reduce", "ring", ranks=3)


def test_an_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="'tree'; the algorithms are direct, pairwise, ring"):
        build("reduce_scatter", "tree", ranks=4)


def test_an_unknown_operation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="'allreduce'; the operations are all_reduce, "):
        build("allreduce", "ring", ranks=4)
    with pytest.raises(UnsupportedError, match="no operation 'sum'"):
        names("sum")


@pytest.mark.parametrize("ranks", [0, -1, 1 << 20])
def test_an_impossible_rank_count_is_refused(ranks: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{ranks} ranks"):
        build("all_reduce", "ring", ranks=ranks)


@pytest.mark.parametrize("root", [-1, 4])
def test_an_impossible_root_is_refused(root: int) -> None:
    with pytest.raises(UnsupportedError, match=f"root {root} is not one of 4 ranks"):
        build("broadcast", "direct", ranks=4, root=root)

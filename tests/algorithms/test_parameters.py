from __future__ import annotations

import pytest

from unisono.algorithms import build, cost, find
from unisono.algorithms.algorithm_spec import Level, Spec, parse
from unisono.errors import UnsupportedError
from unisono.types import Op


def test_names_values_and_pairs_are_parsed() -> None:
    assert parse(Op.ALL_REDUCE, " ring ") == Spec(name="ring")
    assert parse(Op.BROADCAST, "k_nomial:4") == Spec(name="k_nomial", positional=("4",))
    assert parse(Op.ALL_REDUCE, "bucket:4x4,channels=2") == Spec(
        name="bucket", positional=("4x4",), named=(("channels", "2"),)
    )


def test_an_algorithm_may_be_a_value() -> None:
    assert parse(Op.ALL_REDUCE, "reduce_broadcast:reduce=k_nomial:4,broadcast=chain").named == (
        ("reduce", "k_nomial:4"), ("broadcast", "chain"),
    )  # fmt: skip
    assert parse(Op.ALL_REDUCE, "reduce_scatter_all_gather:ring:channels=2").positional == (
        "ring:channels=2",
    )


def test_levels_are_parsed() -> None:
    spec = parse(Op.ALL_REDUCE, "level0:mesh@4; level1:k_nomial:3@2")
    assert spec == Spec(
        name="hierarchical",
        levels=(Level(algorithm="mesh", size=4), Level(algorithm="k_nomial:3", size=2)),
    )
    assert parse(Op.ALL_REDUCE, "level0:NA;level1:ring").levels[1] == Level(algorithm="ring")


@pytest.mark.parametrize(
    ("op", "alias", "name"),
    [
        ("all_reduce", "mesh", "direct"),
        ("all_reduce", "fullmesh", "direct"),
        ("all_reduce", "H-D_R", "halving_doubling"),
        ("reduce_scatter", "H-D_R", "recursive_halving"),
        ("all_gather", "halving_doubling", "recursive_doubling"),
        ("all_gather", "NHR", "nhr"),
        ("all_gather", "NB", "bruck"),
        ("all_reduce", "torus", "bucket"),
        ("all_gather", "neighbor_exchange", "neighbour_exchange"),
    ],
)
def test_aliases_name_the_same_algorithm(op: str, alias: str, name: str) -> None:
    assert find(op, alias) is find(op, name)
    assert build(op, alias, ranks=4).transfers == build(op, name, ranks=4).transfers


WRONG = [
    ("all_reduce", "ring:", "expected values after ':'"),
    ("all_reduce", "bucket:dims=2x2,4", "expected values after ':'"),
    ("all_reduce", "bucket:dims=2x2,dims=4x1", "expected dims once"),
    ("all_reduce", "bucket:2x2,dims=4x1", "expected dims once"),
    ("all_reduce", "ring:4", "the parameters of ring are channels=1"),
    ("all_reduce", "bucket:speed=4", "the parameters of bucket are dims=None, ways=2, channels=1"),
    ("broadcast", "k_nomial:many", "k_nomial: k: expected a whole number like 4, got 'many'"),
    ("broadcast", "k_nomial:0", "expected a whole number"),
    ("broadcast", "k_nomial:1", "expected k of at least 2, got 1"),
    ("all_gather", "bruck:1", "expected a radix of at least 2, got 1"),
    ("all_gather", "pat:3", "expected a power of two as aggregation, got 3"),
    ("all_reduce", "ring:channels=0", "channels: expected a whole number"),
    ("all_reduce", "bucket:2x", "bucket: dims: expected sizes like 4x4, got '2x'"),
    ("all_reduce", "bucket:3x3", "a grid of 3x3 has 9 ranks, expected 4"),
    ("all_reduce", "blueconnect:5", "a grid of 5 has 5 ranks, expected 4"),
    ("all_reduce", "hypercube:2x3", "a grid of 2x3 has 6 ranks, expected 4"),
    ("all_reduce", "swing:2x3", "a grid of 2x3 has 6 ranks, expected 4"),
    ("all_reduce", "torus_rings:8x2", "a grid of 8x2 has 16 ranks, expected 4"),
    ("all_reduce", "level1:ring", "expected 'level0:ALGORITHM'"),
    ("all_reduce", "level0:ring;level2:ring", "expected 'level1:ALGORITHM'"),
    ("all_reduce", "level0:ring;mesh", "expected 'level1:ALGORITHM'"),
    ("all_reduce", "level0:ring@two;level1:ring", "level0 after '@': expected a whole number"),
    ("all_reduce", "level0:ring@3;level1:ring@2", "a grid of 3x2 has 6 ranks, expected 4"),
    ("all_reduce", "level0:ring@3;level1:ring", "a grid of 3x1 has 3 ranks, expected 4"),
    ("all_reduce", "level0:ring@8;level1:ring", "need a size each, or all but one"),
    ("all_reduce", "level0:ring@2;level1:ring;level2:ring", "need a size each, or all but one"),
    ("all_reduce", "level0:one_shot@2;level1:ring", "level 0 must support reduce_scatter"),
    ("all_reduce", "level0:none@2;level1:ring", "'none' supports neither"),
    ("all_gather", "level0:tree@2;level1:ring", "no algorithm 'tree'"),
    ("all_reduce", "reduce_broadcast:ring", "reduce has no algorithm 'ring'"),
    ("barrier", "direct:channels=2", "barrier moves no data"),
]


@pytest.mark.parametrize(("op", "name", "message"), WRONG)
def test_errors_explain_invalid_algorithms(op: str, name: str, message: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        build(op, name, ranks=4)
    assert message in str(error.value)


def test_swing_requires_powers_of_two_on_each_axis() -> None:
    with pytest.raises(UnsupportedError, match="expected powers of two"):
        build("all_reduce", "swing:3x4", ranks=12)


def test_torus_rings_require_at_most_two_axes() -> None:
    with pytest.raises(UnsupportedError, match="one or two axes"):
        build("all_reduce", "torus_rings:3x3x3", ranks=27)


def test_invalid_algorithms_raise_the_same_errors_in_cost_and_build() -> None:
    for op, name, message in WRONG:
        if name != "direct:channels=2" and "reduce_broadcast" not in name:
            with pytest.raises(UnsupportedError) as error:
                cost(op, name, ranks=4)
            assert message in str(error.value), name

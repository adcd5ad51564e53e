"""Every algorithm is correct for many numbers of ranks, and its cost equals its closed form."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases_in_turn import turn
from unisono.algorithms import Cost, build, cost, find, measure, names
from unisono.algorithms.describe import describe
from unisono.schedule import Schedule, check
from unisono.types import Op

EVERY = [(op, name) for op in Op for name in names(op)]
RANKS = (*range(1, 10), 13, 16)

# Algorithms with parameters: (operation, algorithm, ranks).
WITH_PARAMETERS = [
    ("all_reduce", "ring:channels=3", 5),
    ("all_reduce", "bucket:3x2x2", 12),
    ("all_reduce", "bucket:3x2x2,ways=1", 12),
    ("all_reduce", "torus:4x3", 12),
    ("all_reduce", "blueconnect:2x3x2", 12),
    ("all_reduce", "hypercube:4x3", 12),
    ("all_reduce", "torus_rings:5x3", 15),
    ("all_reduce", "torus_rings:1x2x6", 12),
    ("all_reduce", "swing:4x4", 16),
    ("all_reduce", "swing:2x8", 16),
    ("all_reduce", "swing:2x8,channels=2", 16),
    ("all_reduce", "double_binary_tree:1", 7),
    ("all_reduce", "reduce_scatter_all_gather:pat:2", 9),
    ("all_reduce", "reduce_scatter_all_gather:reduce_scatter=pairwise,all_gather=nhr", 6),
    ("all_reduce", "hierarchical:3x2x2", 12),
    ("all_reduce", "level0:mesh@4;level1:halving_doubling@3", 12),
    ("all_reduce", "level0:halving_doubling@3;level1:ring", 12),
    ("all_reduce", "level0:bruck:3@5;level1:pat:aggregation=2@3", 15),
    ("all_reduce", "level0:mesh@2;level1:NB@3;level2:H-D_R@2", 12),
    ("all_reduce", "level0:double_ring@3;level1:one_shot", 6),
    ("reduce_scatter", "level0:ring:channels=2@3;level1:bruck", 12),
    ("all_gather", "level0:neighbor_exchange@4;level1:NHR@3", 12),
    ("all_gather", "bruck:4", 13),
    ("all_gather", "pat:1", 9),
    ("all_gather", "pat:64", 13),
    ("all_gather", "bucket:4x3,channels=2", 12),
    ("all_to_all", "bruck:radix=3,channels=2", 10),
    ("all_to_all", "level0:bruck@3;level1:pairwise@2;level2:mesh@2", 12),
    ("all_to_all", "hypercube:3x4", 12),
    ("broadcast", "k_nomial:3", 14),
    ("broadcast", "double_binary_tree:parts=3", 6),
    ("broadcast", "level0:chain@4;level1:double_binary_tree@3", 12),
    ("reduce", "k_nomial:k=5", 12),
    ("gather", "k_nomial:3", 11),
    ("scatter", "level0:binomial_tree@3;level1:k_nomial:3@4", 12),
    ("broadcast", "binomial_tree:channels=2", 6),
    ("gather", "direct:channels=2", 4),
]  # fmt: skip


def agrees(schedule: Schedule, stated: Cost, *, exact: bool) -> bool:
    """Returns true if the schedule has the stated cost, or at most this cost if it is an upper
    bound.
    """
    real = measure(schedule)
    if exact:
        return real == stated
    return (
        real.rounds == stated.rounds
        and real.bytes_sent <= stated.bytes_sent
        and real.reductions <= stated.reductions
    )


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_every_algorithm_is_correct_and_costs_what_it_states(op: Op, name: str) -> None:
    for ranks in RANKS:
        with turn(ranks=ranks):
            schedule = build(op, name, ranks=ranks, root=ranks // 3)
            assert schedule.collective.op is op
            assert schedule.algorithm == name
            check(schedule)
            assert schedule.num_rounds == measure(schedule).rounds, "no round is empty"
            assert agrees(schedule, cost(op, name, ranks=ranks), exact=find(op, name).exact)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_root_and_number_of_ranks_is_correct(data: st.DataObject) -> None:
    op, name = data.draw(st.sampled_from([(op, name) for op, name in EVERY if op.rooted]))
    ranks = data.draw(st.integers(1, 20))
    schedule = build(op, name, ranks=ranks, root=data.draw(st.integers(0, ranks - 1)))
    check(schedule)
    assert agrees(schedule, cost(op, name, ranks=ranks), exact=find(op, name).exact)


@pytest.mark.parametrize(("op", "name", "ranks"), WITH_PARAMETERS)
def test_algorithms_with_parameters_are_correct(op: str, name: str, ranks: int) -> None:
    schedule = build(op, name, ranks=ranks, root=1)
    assert schedule.algorithm == name
    check(schedule)
    exact = find(op, name).exact and op not in ("broadcast", "scatter")
    assert agrees(schedule, cost(op, name, ranks=ranks), exact=exact)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_hierarchy_is_correct(data: st.DataObject) -> None:
    """Draws an algorithm for each level of a hierarchy and proves the schedule correct."""
    op = data.draw(st.sampled_from([op for op in Op if "hierarchical" in names(op)]))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    served = names(op)
    if op is Op.ALL_REDUCE:
        served = (*set(names("reduce_scatter")) & set(names("all_gather")), *names("broadcast"))
        served = tuple(sorted(n for n in served if n != "scatter_all_gather"))
    level = st.sampled_from([n for n in served if n != "hierarchical"])
    levels = [f"level{i}:{data.draw(level)}@{size}" for i, size in enumerate(sizes)]
    name = ";".join(levels)
    ranks = 1
    for size in sizes:
        ranks *= size
    schedule = build(op, name, ranks=ranks, root=data.draw(st.integers(0, ranks - 1)))
    check(schedule)
    assert agrees(schedule, cost(op, name, ranks=ranks), exact=False)


LOGARITHMIC = [
    ("all_reduce", "recursive_doubling"), ("all_reduce", "halving_doubling"),
    ("all_reduce", "double_binary_tree"), ("all_gather", "bruck"), ("all_gather", "nhr"),
    ("all_gather", "pat"), ("all_gather", "swing"), ("reduce_scatter", "recursive_halving"),
    ("broadcast", "k_nomial"), ("scatter", "binomial_tree"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "name"), LOGARITHMIC)
@pytest.mark.parametrize("ranks", [32, 37, 64])
def test_costs_of_many_ranks_match_the_closed_form(op: str, name: str, ranks: int) -> None:
    schedule = build(op, name, ranks=ranks)
    exact = find(op, name).exact or ranks != 37
    assert agrees(schedule, cost(op, name, ranks=ranks), exact=exact)


def test_a_large_schedule_is_proved() -> None:
    for name in ("halving_doubling", "hierarchical", "swing"):
        check(build("all_reduce", name, ranks=32))


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_costs_match_textbooks(n: int) -> None:
    """Compares costs with closed forms that are independent of the registry."""
    share = Fraction(n - 1, n)
    steps = (n - 1).bit_length()
    textbook = {
        ("all_reduce", "ring"): (2 * (n - 1), 2 * share, share),
        ("all_reduce", "direct"): (2, 2 * share, share),
        ("all_reduce", "one_shot"): (1, n - 1, n - 1),
        ("reduce_scatter", "pairwise"): (n - 1, share, share),
        ("all_gather", "bruck"): (steps, share, 0),
        ("all_gather", "direct"): (1, share, 0),
        ("all_to_all", "pairwise"): (n - 1, share, 0),
        ("broadcast", "binomial_tree"): (steps, steps, 0),
        ("reduce", "binomial_tree"): (steps, 1, steps),
        ("scatter", "binomial_tree"): (steps, share, 0),
        ("gather", "direct"): (1, Fraction(1, n), 0),
        ("broadcast", "direct"): (1, n - 1, 0),
    }
    for (op, name), (rounds, sent, reduced) in textbook.items():
        found = measure(build(op, name, ranks=n))
        assert (found.rounds, found.bytes_sent, found.reductions) == (rounds, sent, reduced), name
    if n & (n - 1) == 0:
        found = measure(build("all_reduce", "halving_doubling", ranks=n))
        assert found == Cost(rounds=2 * steps, bytes_sent=2 * share, reductions=share)


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_every_algorithm_states_its_cost_and_source(op: Op, name: str) -> None:
    about = describe(find(op, name))
    assert about.summary.endswith(".")
    assert about.rounds
    assert about.bytes_sent
    assert bool(about.reductions) == op.reduces
    assert re.search(r"\(.*\)", about.source) or op is Op.BARRIER

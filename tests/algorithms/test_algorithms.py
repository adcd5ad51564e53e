"""Every algorithm is proved for many rank counts, and costs what its docstring says."""

from __future__ import annotations

import importlib
from fractions import Fraction
from inspect import isfunction
from pkgutil import iter_modules

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import algorithms
from unisono.algorithms import build, names
from unisono.schedule import Schedule, check
from unisono.types import Op

EVERY = [(op, name) for op in Op for name in names(op)]
RANKS = (*range(1, 10), 13, 16)


@pytest.mark.parametrize(("op", "name"), EVERY)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_algorithm_is_correct(op: Op, name: str, ranks: int) -> None:
    for root in {0, ranks // 2, ranks - 1} if op.rooted and ranks < 13 else {ranks // 3}:
        schedule = build(op, name, ranks=ranks, root=root)
        assert schedule.collective.op is op
        assert schedule.algorithm == name
        check(schedule)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_root_and_rank_count(data: st.DataObject) -> None:
    op, name = data.draw(st.sampled_from([(op, name) for op, name in EVERY if op.rooted]))
    ranks = data.draw(st.integers(1, 20))
    check(build(op, name, ranks=ranks, root=data.draw(st.integers(0, ranks - 1))))


def sent(schedule: Schedule, rank: int) -> Fraction:
    """What a rank sends, as a multiple of one piece."""
    return Fraction(schedule.chunks_sent(rank), schedule.collective.parts)


def received(schedule: Schedule, rank: int) -> Fraction:
    """What a rank receives, as a multiple of one piece."""
    return Fraction(schedule.chunks_received(rank), schedule.collective.parts)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_bytes_and_rounds_of_symmetric_algorithms(n: int) -> None:
    """Sent by each rank, in pieces; where there are n pieces, a piece is N/n."""
    costs = {
        ("all_reduce", "ring"): (Fraction(2 * (n - 1), n), 2 * (n - 1)),
        ("all_reduce", "direct"): (Fraction(2 * (n - 1), n), 2),
        ("all_reduce", "one_shot"): (n - 1, 1),
        ("reduce_scatter", "direct"): (n - 1, 1),
        ("reduce_scatter", "ring"): (n - 1, n - 1),
        ("reduce_scatter", "pairwise"): (n - 1, n - 1),
        ("all_gather", "direct"): (n - 1, 1),
        ("all_gather", "ring"): (n - 1, n - 1),
        ("all_to_all", "direct"): (n - 1, 1),
        ("all_to_all", "pairwise"): (n - 1, n - 1),
    }
    for (op, name), (pieces, rounds) in costs.items():
        schedule = build(op, name, ranks=n)
        assert schedule.num_rounds == (rounds if n > 1 else 0), name
        for rank in range(n):
            assert sent(schedule, rank) == received(schedule, rank) == pieces, (op, name)


@pytest.mark.parametrize("log_n", [0, 1, 3, 4])
def test_costs_of_recursive_doubling(log_n: int) -> None:
    n = 1 << log_n
    all_reduce = build("all_reduce", "recursive_doubling", ranks=n)
    all_gather = build("all_gather", "recursive_doubling", ranks=n)
    assert all(sent(all_reduce, rank) == log_n for rank in range(n))
    assert all(sent(all_gather, rank) == n - 1 for rank in range(n))
    assert len(list(all_reduce.rounds())) == len(list(all_gather.rounds())) == log_n


@pytest.mark.parametrize("n", [3, 5, 6, 7, 9, 13])
def test_recursive_doubling_folds_the_extra_ranks_in_two_rounds(n: int) -> None:
    rounds = (n.bit_length() - 1) + 2
    for op in ("all_reduce", "all_gather"):
        assert len(list(build(op, "recursive_doubling", ranks=n).rounds())) == rounds


@pytest.mark.parametrize("n", [2, 3, 8, 13])
@pytest.mark.parametrize("root", [0, 1])
def test_costs_of_rooted_algorithms(n: int, root: int) -> None:
    depth = (n - 1).bit_length()
    other = (root + 1) % n
    for op in ("broadcast", "reduce", "gather", "scatter"):
        tree = build(op, "binomial_tree", ranks=n, root=root)
        assert tree.num_rounds == depth
        assert build(op, "direct", ranks=n, root=root).num_rounds == 1
    assert sent(build("broadcast", "direct", ranks=n, root=root), root) == n - 1
    assert sent(build("broadcast", "binomial_tree", ranks=n, root=root), root) == depth
    assert received(build("reduce", "direct", ranks=n, root=root), root) == n - 1
    assert sent(build("reduce", "direct", ranks=n, root=root), other) == 1
    assert sent(build("scatter", "direct", ranks=n, root=root), root) == n - 1
    assert sent(build("scatter", "binomial_tree", ranks=n, root=root), root) == n - 1
    assert received(build("gather", "binomial_tree", ranks=n, root=root), root) == n - 1
    spread = build("broadcast", "scatter_all_gather", ranks=n, root=root)
    assert sent(spread, root) == Fraction(2 * (n - 1), n)
    assert sent(spread, other) == Fraction(n - 2, n)
    gathered = build("reduce", "reduce_scatter_gather", ranks=n, root=root)
    assert sent(gathered, root) == Fraction(n - 1, n)
    assert sent(gathered, other) == 1
    chain = build("broadcast", "chain", ranks=n, root=root)
    assert {sent(chain, rank) for rank in range(n)} == {0, 1}
    assert chain.num_rounds == 2 * (n - 1) + n - 2


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 13])
def test_costs_of_scans(n: int) -> None:
    """Sent at most by any rank, and rounds."""
    doubling, shifted = (n - 1).bit_length(), (max(n - 1, 1) - 1).bit_length()
    pipeline = 2 * (n - 1) + n - 2
    costs = {
        ("scan", "direct"): (n - 1, 1),
        ("scan", "recursive_doubling"): (doubling, doubling),
        ("scan", "chain"): (1, pipeline),
        ("exscan", "direct"): (max(n - 1, 1), 2 if n > 2 else 1),
        ("exscan", "recursive_doubling"): (1 + shifted, 1 + shifted),
        ("exscan", "chain"): (2 if n > 2 else 1, pipeline if n > 2 else 1),
    }
    for (op, name), (pieces, rounds) in costs.items():
        schedule = build(op, name, ranks=n)
        assert schedule.num_rounds == (rounds if n > 1 else 0), (op, name)
        most = Fraction(int(schedule.chunks_sent_by_rank().max()), schedule.collective.parts)
        assert most == (pieces if n > 1 else 0), (op, name)


def test_ring_talks_to_neighbours_only() -> None:
    for op in ("all_reduce", "reduce_scatter", "all_gather"):
        for t in build(op, "ring", ranks=6).transfers:
            assert t.dst == (t.src + 1) % 6


def test_pairwise_sends_and_receives_one_piece_a_round() -> None:
    for op in ("reduce_scatter", "all_to_all"):
        for _, transfers in build(op, "pairwise", ranks=5).rounds():
            assert sorted(t.src for t in transfers) == list(range(5))
            assert sorted(t.dst for t in transfers) == list(range(5))


def test_a_barrier_moves_nothing() -> None:
    assert len(build("barrier", "direct", ranks=5).transfers) == 0


FAMILIES = [m.name for m in iter_modules(algorithms.__path__) if m.name != "registry"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_algorithm_states_its_cost(family: str) -> None:
    module = importlib.import_module(f"unisono.algorithms.{family}")
    functions = [
        f for f in vars(module).values() if isfunction(f) and f.__module__ == module.__name__
    ]
    for function in functions:
        if not function.__name__.startswith("_"):
            assert "Rounds:" in function.__doc__
            assert "Bytes:" in function.__doc__
            assert "Source:" in function.__doc__ or function.__name__ == "barrier"

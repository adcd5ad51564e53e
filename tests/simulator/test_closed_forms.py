"""Tests of simulated times against closed forms of the literature: startups, bytes and reductions
of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import ceil, log2, sqrt

import pytest

from closed_forms import Rows
from unisono import algorithms, simulate, topology
from unisono.algorithms.schedule_composition import in_sequence
from unisono.errors import UnsupportedError
from unisono.schedule import Builder, Collective, Schedule, check
from unisono.simulator import Conditions, Endpoint, Order, bound_s
from unisono.topology import Cable, LinkKind, Topology
from unisono.types import Op

TABLE = Rows("alpha_beta_collectives.csv", "collective", "algorithm")
ALPHA_S, RATE_BPS, REDUCE_BPS = 1e-6, 1e9, 4e9
BETA, GAMMA = 1 / RATE_BPS, 1 / REDUCE_BPS
N = 1 << 20


def full_mesh(ranks: int, latency_s: float = ALPHA_S) -> Topology:
    """Returns a network in which only the ranks' ports and the latency take time."""
    cable = Cable(bandwidth_Bps=1e18, latency_s=latency_s, kind=LinkKind.OTHER)
    return topology.mesh(ranks, cable=cable)


def on_mesh(
    op: str, name: str | Schedule, p: int, *, order: Order = Order.ROUNDS, nbytes: float = N
) -> float:
    ports = Endpoint(send_Bps=RATE_BPS, receive_Bps=RATE_BPS, reduce_Bps=REDUCE_BPS)
    schedule = algorithms.build(op, name, ranks=p) if isinstance(name, str) else name
    conditions = Conditions(endpoint=ports, order=order)
    return simulate(schedule, full_mesh(p), nbytes, conditions=conditions).time_s


def lg(p: int) -> int:
    return ceil(log2(p))


def a_b(rounds: float, share: float, reduced: float = 0.0) -> float:
    return rounds * ALPHA_S + share * N * BETA + reduced * N * GAMMA


# By collective and algorithm of the table: our operation, our algorithm, the table's formula, and
# the numbers of ranks for which the formula holds.
POWERS, ANY = (2, 4, 8, 16), (2, 3, 5, 8, 13)
Form = tuple[str, str, Callable[[int], float], tuple[int, ...]]
FORMS: dict[tuple[str, str], Form] = {
    ("Broadcast", "binomial tree"): (
        "broadcast", "binomial_tree", lambda p: lg(p) * a_b(1, 1), POWERS,
    ),
    ("Scatter / Gather", "binomial"): (
        "scatter", "binomial_tree", lambda p: a_b(lg(p), (p - 1) / p), POWERS,
    ),
    ("Allgather", "ring"): ("all_gather", "ring", lambda p: a_b(p - 1, (p - 1) / p), ANY),
    ("Allgather", "recursive doubling"): (
        "all_gather", "recursive_doubling", lambda p: a_b(lg(p), (p - 1) / p), POWERS,
    ),
    ("Allgather", "Bruck"): ("all_gather", "bruck", lambda p: a_b(lg(p), (p - 1) / p), ANY),
    ("Reduce-scatter", "ring / pairwise"): (
        "reduce_scatter", "ring", lambda p: a_b(p - 1, (p - 1) / p, (p - 1) / p), ANY,
    ),
    ("Reduce-scatter", "recursive halving"): (
        "reduce_scatter", "recursive_halving",
        lambda p: a_b(lg(p), (p - 1) / p, (p - 1) / p), POWERS,
    ),
    ("Reduce", "binomial"): (
        "reduce", "binomial_tree", lambda p: lg(p) * a_b(1, 1, 1), POWERS,
    ),
    ("Allreduce", "recursive doubling"): (
        "all_reduce", "recursive_doubling", lambda p: lg(p) * a_b(1, 1, 1), POWERS,
    ),
    ("Allreduce", "Rabenseifner: rec. halving RS + rec. doubling AG"): (
        "all_reduce", "halving_doubling",
        lambda p: a_b(2 * lg(p), 2 * (p - 1) / p, (p - 1) / p), POWERS,
    ),
    ("Allreduce", "ring"): (
        "all_reduce", "ring", lambda p: a_b(2 * (p - 1), 2 * (p - 1) / p, (p - 1) / p), ANY,
    ),
    ("Allreduce", "reduce+bcast binomial"): (
        "all_reduce", "reduce_broadcast",
        lambda p: 2 * lg(p) * a_b(1, 1) + lg(p) * N * GAMMA, POWERS,
    ),
    ("Alltoall", "Bruck (index)"): (
        "all_to_all", "bruck", lambda p: a_b(lg(p), log2(p) / 2), POWERS,
    ),
    ("Alltoall", "pairwise exchange / linear"): (
        "all_to_all", "pairwise", lambda p: a_b(p - 1, (p - 1) / p), ANY,
    ),
}  # fmt: skip


@TABLE.has(*FORMS)
@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: f"{form[0]}-{form[1]}")
def test_alpha_beta_gamma(form: Form) -> None:
    op, name, formula, counts = form
    for p in counts:
        assert on_mesh(op, name, p) == pytest.approx(formula(p), rel=1e-3)


@TABLE.has(
    ("Allreduce", "hierarchical g per node x k nodes"),
    ("Allreduce", "BlueConnect p=prod p_i"),
    ("Allreduce", "2D-torus (Sony) X x Y"),
)
def test_hierarchical_forms() -> None:
    """Tests that the time is the sum of the stages, each with its share of the bytes."""
    g, k = 4, 3
    form = 2 * a_b(g - 1, (g - 1) / g, (g - 1) / g / 2)
    form += 2 * a_b(k - 1, (k - 1) / k / g, (k - 1) / k / g / 2)
    for name in ("level0:ring@4;level1:ring@3", "blueconnect:dims=4x3"):
        assert on_mesh("all_reduce", name, g * k) == pytest.approx(form, rel=1e-3)


@TABLE.has(
    ("Broadcast", "scatter (binomial) + ring allgather (van de Geijn)"),
    ("Broadcast", "scatter + recursive-doubling allgather"),
    ("Reduce", "Rabenseifner: rec. halving RS + binomial gather"),
)
@pytest.mark.parametrize("p", POWERS)
def test_two_operations_in_sequence_have_the_closed_form(p: int) -> None:
    share = (p - 1) / p
    scatter = algorithms.build("scatter", "binomial_tree", ranks=p)
    for name, rounds in (("ring", p - 1), ("recursive_doubling", lg(p))):
        whole = in_sequence(Op.BROADCAST, [scatter, algorithms.build("all_gather", name, ranks=p)])
        form = a_b(lg(p) + rounds, 2 * share)
        assert on_mesh("broadcast", whole, p) == pytest.approx(form, rel=1e-3)
    halves = algorithms.build("reduce_scatter", "recursive_halving", ranks=p)
    gather = algorithms.build("gather", "binomial_tree", ranks=p)
    whole = in_sequence(Op.REDUCE, [halves, gather])
    form = a_b(2 * lg(p), 2 * share, share)
    assert on_mesh("reduce", whole, p) == pytest.approx(form, rel=1e-3)


@TABLE.has(("Alltoall", "hierarchical (intra then inter, PXN-like)"))
def test_all_to_all_within_hosts_then_between_hosts() -> None:
    form = a_b(3 + 2, 3 / 4 + 2 / 3)
    name = "level0:pairwise@4;level1:pairwise@3"
    assert on_mesh("all_to_all", name, 12) == pytest.approx(form, rel=1e-3)


@TABLE.has(("Broadcast", "pipelined chain, S segments"))
def test_pipelined_chain() -> None:
    """Compares the time with (p - 2 + S)(a + n b / S), where S is the number of segments."""
    for p in (3, 5, 8):
        segments = algorithms.build("broadcast", "chain", ranks=p).collective.parts
        form = (p - 2 + segments) * a_b(1, 1 / segments)
        assert on_mesh("broadcast", "chain", p) == pytest.approx(form, rel=1e-3)


@TABLE.has(("Allreduce", "NVLS / in-switch (SHARP)"))
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_in_switch_all_reduce(ranks: int) -> None:
    """Compares the simulated time with 2a + n b (NVLS, SHARP): every rank sends n bytes once and
    receives n bytes once.
    """
    cable = Cable(bandwidth_Bps=RATE_BPS, latency_s=ALPHA_S, kind=LinkKind.NVLINK)
    node = topology.star(ranks, cable=cable, reduces=True)
    one_shot = algorithms.build("all_reduce", "one_shot", ranks=ranks)
    merged = simulate(one_shot, node, N, conditions=Conditions(in_network=True))
    assert merged.time_s == pytest.approx(2 * ALPHA_S + N * BETA, rel=1e-9)
    plain = simulate(one_shot, node, N)
    assert plain.time_s == pytest.approx(2 * ALPHA_S + (ranks - 1) * N * BETA, rel=1e-9)


@TABLE.has(("Scatter / Gather", "linear"))
@pytest.mark.parametrize("p", ANY)
def test_direct_scatter_sends_one_message_after_another(p: int) -> None:
    """Tests that the startups of all messages add up. A startup is modelled as time in which the
    sender is busy; with a latency instead, all startups would overlap.
    """
    ports = Endpoint(send_Bps=RATE_BPS, busy_s=ALPHA_S)
    schedule = algorithms.build("scatter", "direct", ranks=p)
    conditions = Conditions(endpoint=ports, order=Order.PROGRAM)
    time_s = simulate(schedule, full_mesh(p, 0.0), N, conditions=conditions).time_s
    assert time_s == pytest.approx(a_b(p - 1, (p - 1) / p), rel=1e-3)


@TABLE.has(("Broadcast", "two-tree / double binary tree pipelined"))
@pytest.mark.parametrize("p", [8, 13, 16])
def test_two_trees(p: int) -> None:
    """Compares the simulated time with 2 (D + K - 1) rounds of N / 2K. D is the depth of the trees,
    and K the number of parts sent down each tree. With the best K, this is the table's formula,
    whose lg p is D - 1. A rank can start a round before it ends the previous one, so only the
    startups along one path from the root remain.
    """
    depth = lg(p)

    def form(parts: float, startup_s: float) -> float:
        return 2 * (depth + parts - 1) * (startup_s + N * BETA / (2 * parts))

    ports = Endpoint(send_Bps=RATE_BPS, receive_Bps=RATE_BPS)
    conditions = Conditions(endpoint=ports, order=Order.STREAMS)
    for parts in (1, 4, 16):
        schedule = algorithms.build("broadcast", f"double_binary_tree:parts={parts}", ranks=p)
        without = simulate(schedule, full_mesh(p, 0.0), N, conditions=conditions).time_s
        assert without == pytest.approx(form(parts, 0.0), rel=1e-3)
        assert simulate(schedule, full_mesh(p), N, conditions=conditions).time_s <= form(
            parts, ALPHA_S
        )
        startups = simulate(schedule, full_mesh(p), 1e-6, conditions=conditions).time_s
        assert startups == pytest.approx(depth * ALPHA_S, rel=1e-3)
    best = sqrt((depth - 1) * N * BETA / (2 * ALPHA_S))
    steps, whole = 2 * (depth - 1) * ALPHA_S, N * BETA
    assert form(best, ALPHA_S) == pytest.approx(steps + whole + 2 * sqrt(steps * whole))


@TABLE.has(("Allreduce", "double binary tree, S segments (NCCL tree)"))
@pytest.mark.parametrize("p", [5, 8, 16])
def test_two_trees_all_reduce(p: int) -> None:
    """Tests two limits: without byte costs the time is 2 lg p startups, and without startups it
    approaches 2 n b.
    """
    short = algorithms.build("all_reduce", "double_binary_tree:parts=1", ranks=p)
    startups = on_mesh("all_reduce", short, p, order=Order.NONE, nbytes=1e-6)
    assert startups == pytest.approx(2 * lg(p) * ALPHA_S, rel=1e-3)
    long = algorithms.build("all_reduce", "double_binary_tree:parts=512", ranks=p)
    ports = Endpoint(send_Bps=RATE_BPS, receive_Bps=RATE_BPS)
    conditions = Conditions(endpoint=ports, order=Order.ROUNDS)
    whole = simulate(long, full_mesh(p, 0.0), N, conditions=conditions).time_s
    assert whole == pytest.approx(2 * N * BETA, rel=0.02)


@TABLE.has(("Reduce-scatter", "recursive doubling"))
@pytest.mark.parametrize("p", POWERS)
def test_reduce_scatter_for_reductions_that_do_not_commute(p: int) -> None:
    """Compares recursive doubling with its closed form. The registry lacks this algorithm, because
    recursive halving is never slower.

    In step k a rank sends partial sums to its partner at distance 2^k. It sends all pieces except
    those of the 2^k ranks whose data it has.
    """
    b = Builder(Collective(op=Op.REDUCE_SCATTER, ranks=p), "recursive_doubling")
    for k in range(lg(p)):
        for rank in range(p):
            heard = rank >> k
            for piece in range(p):
                if piece >> k != heard:
                    b.reduce(rank, piece, rank ^ (1 << k))
        b.next_round()
    schedule = b.build()
    check(schedule)
    share = lg(p) - (p - 1) / p
    assert on_mesh("reduce_scatter", schedule, p) == pytest.approx(
        a_b(lg(p), share, share), rel=1e-3
    )


@TABLE.has(("Send/Recv ring shift", "neighbour exchange"))
def test_one_message() -> None:
    assert on_mesh("broadcast", "direct", 2) == pytest.approx(a_b(1, 1), rel=1e-9)


@TABLE.has(("Barrier", "dissemination"))
def test_a_barrier_moves_nothing() -> None:
    """Tests that a simulated barrier takes no time, since executors count arrivals without
    messages.
    """
    for p in ANY:
        assert on_mesh("barrier", "direct", p) == 0.0


@TABLE.has(
    ("LOWER BOUND", "Bcast"),
    ("LOWER BOUND", "Allgather / Scatter / Gather"),
    ("LOWER BOUND", "Reduce-scatter"),
    ("LOWER BOUND", "Allreduce"),
)
@pytest.mark.parametrize("p", ANY)
def test_bounds(p: int) -> None:
    """Compares bounds for ranks at one switch with closed forms of the bytes and the reductions.
    The table's startups are not compared, since they hold for ranks with one port.
    """
    star = topology.star(p, cable=Cable(bandwidth_Bps=RATE_BPS, latency_s=0.0, kind=LinkKind.OTHER))
    others = (p - 1) / p
    bounds = {"broadcast": 1.0, "all_gather": others, "scatter": others, "gather": others}
    reducing = {"reduce_scatter": others, "all_reduce": 2 * others}
    for op, share in (bounds | reducing).items():
        assert bound_s(op, star, N) == pytest.approx(share * N * BETA, rel=1e-9)
    for op in reducing:
        for name in algorithms.names(op):
            with suppress(UnsupportedError):
                assert algorithms.cost(op, name, ranks=p).reductions >= others - 1e-9


def test_every_table_row_is_tested() -> None:
    assert TABLE.tested == TABLE.known

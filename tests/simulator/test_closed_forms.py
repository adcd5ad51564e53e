"""Times against the closed forms of the literature, whose tables are beside this file."""

from __future__ import annotations

import csv
from collections.abc import Callable
from math import ceil, log2, prod
from pathlib import Path

import numpy as np
import pytest

from unisono import algorithms, simulate, topology
from unisono.algorithms.compose import in_sequence
from unisono.schedule import Schedule
from unisono.simulator import Conditions, Endpoint, Job, Order
from unisono.topology import Cable, LinkKind, Topology
from unisono.types import Op

TABLES = Path(__file__).parent / "tables"
ALPHA_S, RATE_BPS, REDUCE_BPS = 1e-6, 1e9, 4e9
BETA, GAMMA = 1 / RATE_BPS, 1 / REDUCE_BPS
N = 1 << 20


def rows(name: str) -> list[dict[str, str]]:
    lines = [line for line in (TABLES / name).read_text().splitlines() if line[0] != "#"]
    return list(csv.DictReader(lines))


def full_mesh(ranks: int) -> Topology:
    """Where only the ports of the ranks, and the latency, cost anything."""
    cable = Cable(bandwidth_Bps=1e18, latency_s=ALPHA_S, kind=LinkKind.OTHER)
    return topology.mesh(ranks, cable=cable)


def on_mesh(op: str, name: str | Schedule, p: int, *, order: Order = Order.ROUNDS) -> float:
    ports = Endpoint(send_Bps=RATE_BPS, receive_Bps=RATE_BPS, reduce_Bps=REDUCE_BPS)
    schedule = algorithms.build(op, name, ranks=p) if isinstance(name, str) else name
    return simulate(
        schedule, full_mesh(p), N, conditions=Conditions(endpoint=ports, order=order)
    ).time_s


def lg(p: int) -> int:
    return ceil(log2(p))


def a_b(rounds: float, share: float, reduced: float = 0.0) -> float:
    return rounds * ALPHA_S + share * N * BETA + reduced * N * GAMMA


# (collective, algorithm as the table has them): our operation and algorithm, the table's formula,
# and for which rank counts it holds.
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


def test_the_forms_are_those_of_the_table() -> None:
    known = {(row["collective"], row["algorithm"]) for row in rows("alpha_beta_collectives.csv")}
    assert set(FORMS) <= known


@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: f"{form[0]}-{form[1]}")
def test_alpha_beta_gamma(form: Form) -> None:
    op, name, formula, counts = form
    for p in counts:
        assert on_mesh(op, name, p) == pytest.approx(formula(p), rel=1e-3)


def test_hierarchical_forms() -> None:
    """Stage by stage, each with its share; `BlueConnect` and `hierarchical g per node x k`."""
    g, k = 4, 3
    form = 2 * a_b(g - 1, (g - 1) / g, (g - 1) / g / 2)
    form += 2 * a_b(k - 1, (k - 1) / k / g, (k - 1) / k / g / 2)
    for name in ("level0:ring@4;level1:ring@3", "blueconnect:dims=4x3"):
        assert on_mesh("all_reduce", name, g * k) == pytest.approx(form, rel=1e-3)


@pytest.mark.parametrize("p", POWERS)
def test_forms_of_two_operations_one_after_the_other(p: int) -> None:
    """`scatter (binomial) + ring allgather (van de Geijn)`, `scatter + recursive-doubling
    allgather`, `Rabenseifner: rec. halving RS + binomial gather`."""
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


def test_all_to_all_in_servers_then_between_them() -> None:
    """`hierarchical (intra then inter, PXN-like)`"""
    form = a_b(3 + 2, 3 / 4 + 2 / 3)
    name = "level0:pairwise@4;level1:pairwise@3"
    assert on_mesh("all_to_all", name, 12) == pytest.approx(form, rel=1e-3)


def test_pipelined_chain() -> None:
    """(p - 2 + S)(a + n b / S), S the segments."""
    for p in (3, 5, 8):
        segments = algorithms.build("broadcast", "chain", ranks=p).collective.parts
        form = (p - 2 + segments) * a_b(1, 1 / segments)
        assert on_mesh("broadcast", "chain", p) == pytest.approx(form, rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_in_switch(ranks: int) -> None:
    """NVLS / SHARP: 2a + n b: every rank sends n once and receives n once."""
    cable = Cable(bandwidth_Bps=RATE_BPS, latency_s=ALPHA_S, kind=LinkKind.NVLINK)
    node = topology.star(ranks, cable=cable, reduces=True)
    one_shot = algorithms.build("all_reduce", "one_shot", ranks=ranks)
    merged = simulate(one_shot, node, N, conditions=Conditions(in_network=True))
    assert merged.time_s == pytest.approx(2 * ALPHA_S + N * BETA, rel=1e-9)
    plain = simulate(one_shot, node, N)
    assert plain.time_s == pytest.approx(2 * ALPHA_S + (ranks - 1) * N * BETA, rel=1e-9)


# ---- tori: what congestion costs, without latencies


def bandwidth_s(name: str, dims: tuple[int, ...]) -> float:
    """As a multiple of n/B."""
    cable = Cable(bandwidth_Bps=RATE_BPS, latency_s=0.0, kind=LinkKind.OTHER)
    net = topology.torus(dims, cable=cable)
    schedule = algorithms.build("all_reduce", name, ranks=net.num_ranks, levels=dims[::-1])
    return simulate(schedule, net, N).time_s * RATE_BPS / N


def test_rings() -> None:
    for p in (4, 7, 16):
        assert bandwidth_s("ring", (p,)) == pytest.approx(2 * (p - 1) / p, rel=1e-3)
        # Half of the pieces go each way; of an odd number of others, one way has one more.
        half = p // 2
        assert bandwidth_s("bidirectional_ring", (p,)) == pytest.approx(2 * half / p, rel=1e-3)


def test_both_directions_of_a_ring_are_the_bound() -> None:
    """`bidirectional ring on ring(p)`: half of the vector each way, all the way round."""
    for p in (4, 7, 16):
        assert bandwidth_s("torus_rings", (p,)) == pytest.approx((p - 1) / p, rel=1e-3)


@pytest.mark.parametrize("dims", [(4, 4), (8, 8), (16, 16), (4, 4, 4), (8, 8, 8)])
def test_halving_doubling_axis_by_axis(dims: tuple[int, ...]) -> None:
    """`Rabenseifner on torus`: the largest messages go to neighbours, along one axis after the
    other, so step s loads a link with 2^(s // D) messages of n / 2^(s+1); half of that where it is
    half way round. In the limit 1.5 in two dimensions, 1.167 in three."""
    axes, n = len(dims), prod(dims)
    steps = int(log2(n))
    place = np.zeros(n, np.int64)
    for s in range(steps):
        bit = np.arange(n) >> (steps - 1 - s) & 1
        place += (bit << s // axes) * dims[0] ** (s % axes)
    both_ways = [2 if s // axes == log2(dims[0]) - 1 else 1 for s in range(steps)]
    form = sum(2 ** (s // axes) / 2 ** (s + 1) / both_ways[s] for s in range(steps))
    cable = Cable(bandwidth_Bps=RATE_BPS, latency_s=0.0, kind=LinkKind.OTHER)
    schedule = algorithms.build("all_reduce", "halving_doubling", ranks=n)
    job = Job(schedule=schedule, nbytes=N, ranks=tuple(place.tolist()))
    told = Conditions(order=Order.ROUNDS)
    time_s = simulate([job], topology.torus(dims, cable=cable), conditions=told).time_s
    assert time_s == pytest.approx(2 * form * N / RATE_BPS, rel=1e-3)


def test_hamiltonian_rings_fill_all_links() -> None:
    for k in (4, 8):
        n = k * k
        assert bandwidth_s("torus_rings", (k, k)) == pytest.approx(2 * (n - 1) / n / 4, rel=1e-3)


@pytest.mark.parametrize("dims", [(4, 4), (8, 8), (4, 4, 4)])
def test_buckets_both_ways(dims: tuple[int, ...]) -> None:
    """2D shards at once reach the bound; D shards, all one way, half of it."""
    bound = 2 * (prod(dims) - 1) / prod(dims) / (2 * len(dims))
    assert bandwidth_s("bucket", dims) == pytest.approx(bound, rel=1e-3)
    assert bandwidth_s("bucket:ways=1", dims) == pytest.approx(2 * bound, rel=1e-3)


def congestion(dims: tuple[int, ...]) -> float:
    n, ports = dims[0] ** len(dims), 2 * len(dims)
    return bandwidth_s(f"swing:ports={ports}", dims) / (2 * (n - 1) / n / ports)


def test_swing_is_congested_as_its_distances_say() -> None:
    """Each step s along an axis loads every link with |delta_s| messages of n / 2^(s+1)."""
    for dims in ((8, 8), (16, 16), (4, 4, 4), (8, 8, 8)):
        steps = log2(dims[0] ** len(dims))
        loads = [abs(1 - (-2) ** (s // len(dims) + 1)) / 3 for s in range(int(steps))]
        form = sum(load / 2 ** (s + 1) for s, load in enumerate(loads))
        n = dims[0] ** len(dims)
        assert congestion(dims) == pytest.approx(form * n / (n - 1), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "limit"), [((64, 64), 1.200), ((16, 16, 16), 1.037), ((8, 8, 8, 8), 1.0084)]
)
def test_swing_nears_its_limits(dims: tuple[int, ...], limit: float) -> None:
    assert congestion(dims) == pytest.approx(limit, rel=0.02)

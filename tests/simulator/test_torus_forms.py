"""Tests of times on rings and tori against the literature's table of the cost of congestion."""

from __future__ import annotations

from math import log2, prod

import numpy as np
import pytest
from numpy.typing import NDArray

from closed_forms import Rows
from unisono import algorithms, simulate, topology
from unisono.schedule import Builder, Collective, Schedule, check
from unisono.simulator import Conditions, Job, Order
from unisono.topology import Cable, LinkKind, Topology
from unisono.types import Op

RATE_BPS, N = 1e9, 1 << 20
TABLE = Rows("torus_allreduce.csv", "algorithm")


def torus(dims: tuple[int, ...], *, rate_Bps: float = RATE_BPS, latency_s: float = 0.0) -> Topology:
    cable = Cable(bandwidth_Bps=rate_Bps, latency_s=latency_s, kind=LinkKind.OTHER)
    return topology.torus(dims, cable=cable)


def all_reduce(name: str, dims: tuple[int, ...]) -> Schedule:
    return algorithms.build("all_reduce", name, ranks=prod(dims), levels=dims[::-1])


def bandwidth_s(name: str, dims: tuple[int, ...]) -> float:
    """Returns the simulated time as a multiple of n/B, the time of the whole vector on one link."""
    return simulate(all_reduce(name, dims), torus(dims), N).time_s * RATE_BPS / N


def in_rounds_s(
    schedule: Schedule, dims: tuple[int, ...], place: NDArray[np.int64] | None = None
) -> float:
    """Returns the time if rounds do not overlap, as a multiple of n/B; `place` has the position of
    each rank in the torus.
    """
    ranks = None if place is None else tuple(place.tolist())
    job = Job(schedule=schedule, nbytes=N, ranks=ranks)
    conditions = Conditions(order=Order.ROUNDS)
    return simulate([job], torus(dims), conditions=conditions).time_s * RATE_BPS / N


def steps(name: str, dims: tuple[int, ...]) -> int:
    """Returns the number of successive latencies between neighbours, from a simulation in which
    bytes cost nothing.
    """
    net = torus(dims, rate_Bps=1e30, latency_s=1.0)
    return round(simulate(all_reduce(name, dims), net, N).time_s)


@TABLE.has("1 ring, unidirectional on ring(p)")
def test_a_ring_uses_one_direction() -> None:
    for p in (4, 7, 16):
        assert bandwidth_s("ring", (p,)) == pytest.approx(2 * (p - 1) / p, rel=1e-3)
        assert steps("ring", (p,)) == 2 * (p - 1)
        # Half of the pieces go in each direction. With an odd number of other ranks, one direction
        # has one more piece.
        half = p // 2
        assert bandwidth_s("bidirectional_ring", (p,)) == pytest.approx(2 * half / p, rel=1e-3)


@TABLE.has("bidirectional ring on ring(p)")
def test_two_rings_in_both_directions_reach_the_bound() -> None:
    """Tests that two rings reach the bound. Each half of the vector goes around the whole ring in
    its own direction.
    """
    for p in (4, 7, 16):
        assert bandwidth_s("torus_rings", (p,)) == pytest.approx((p - 1) / p, rel=1e-3)
        assert steps("torus_rings", (p,)) == 2 * (p - 1)


@TABLE.has("Hamiltonian rings, D dims (2D of D=2 -> 2 edge-disjoint cycles x 2 directions)")
def test_hamiltonian_rings_fill_all_links() -> None:
    for k in (4, 8):
        n = k * k
        assert bandwidth_s("torus_rings", (k, k)) == pytest.approx(2 * (n - 1) / n / 4, rel=1e-3)
        assert steps("torus_rings", (k, k)) == 2 * (n - 1)


@TABLE.has("Bucket / multi-dim ring, 2D concurrent shards, k per side", "LOWER BOUND")
@pytest.mark.parametrize("dims", [(4, 4), (8, 8), (4, 4, 4)])
def test_buckets_in_both_directions(dims: tuple[int, ...]) -> None:
    """Tests that 2 x D concurrent shards (two directions of D axes) reach the bound of the time,
    and that D shards in one direction take twice as long.
    """
    bound = 2 * (prod(dims) - 1) / prod(dims) / (2 * len(dims))
    assert bandwidth_s("bucket", dims) == pytest.approx(bound, rel=1e-3)
    assert bandwidth_s("bucket:ways=1", dims) == pytest.approx(2 * bound, rel=1e-3)
    assert steps("bucket", dims) == 2 * len(dims) * (dims[0] - 1)
    assert steps("bucket", dims) >= torus(dims).diameter()


@TABLE.has("Sequential multi-dim ring (2D-torus, Sony), one dim at a time, bidir")
@pytest.mark.parametrize("dims", [(4, 4), (8, 8), (4, 4, 4)])
def test_sequential_rings_use_one_axis_at_a_time(dims: tuple[int, ...]) -> None:
    """Compares the time with the closed form of rings that use both directions of one axis at a
    time, while the links of the other axes are idle.
    """
    levels = [f"level{i}:torus_rings:dims={k}@{k}" for i, k in enumerate(dims)]
    schedule = algorithms.build("all_reduce", ";".join(levels), ranks=prod(dims))
    bound = 2 * (prod(dims) - 1) / prod(dims) / 2
    assert in_rounds_s(schedule, dims) == pytest.approx(bound, rel=1e-3)
    assert schedule.num_rounds == 2 * len(dims) * (dims[0] - 1)


# ---- halving and doubling, placed axis by axis


def places(dims: tuple[int, ...], *, last_bit_first: bool) -> NDArray[np.int64]:
    """Returns positions at which the partners of step s are 2^(s // D) apart along axis s % D.

    Step s is an exchange along bit s of the rank, counted from the last bit or from the first bit.
    """
    count = int(log2(prod(dims)))
    place = np.zeros(prod(dims), np.int64)
    for s in range(count):
        bit = np.arange(prod(dims)) >> (s if last_bit_first else count - 1 - s) & 1
        place += (bit << s // len(dims)) * dims[0] ** (s % len(dims))
    return place


def loads(dims: tuple[int, ...]) -> list[float]:
    """Returns the number of messages on the busiest link in each step. A step to the opposite
    position uses both directions, so each link carries half of its messages.
    """
    count, axes = int(log2(prod(dims))), len(dims)
    half_way = log2(dims[0]) - 1
    return [2 ** (s // axes) / (2 if s // axes == half_way else 1) for s in range(count)]


SQUARES_AND_CUBES = pytest.mark.parametrize(
    "dims", [(4, 4), (8, 8), (16, 16), (4, 4, 4), (8, 8, 8)]
)


@TABLE.has("Rabenseifner on torus (min routing), single port")
@SQUARES_AND_CUBES
def test_halving_doubling_axis_by_axis(dims: tuple[int, ...]) -> None:
    """Compares the time with the sum of all steps. Ranks are placed so that the largest messages go
    to neighbours, along one axis after another. Step s loads a link with 2^(s // D) messages of n /
    2^(s+1). The limit is 1.5 in two dimensions and 1.167 in three.
    """
    schedule = algorithms.build("all_reduce", "halving_doubling", ranks=prod(dims))
    form = 2 * sum(load / 2 ** (s + 1) for s, load in enumerate(loads(dims)))
    place = places(dims, last_bit_first=False)
    assert in_rounds_s(schedule, dims, place) == pytest.approx(form, rel=1e-3)
    assert schedule.num_rounds == 2 * log2(prod(dims))


@TABLE.has("Recursive doubling latency-optimal, single port")
@SQUARES_AND_CUBES
def test_recursive_doubling_axis_by_axis(dims: tuple[int, ...]) -> None:
    """Compares the time with sum_s 2^floor(s/D) n / B, since every step sends the whole vector."""
    schedule = algorithms.build("all_reduce", "recursive_doubling", ranks=prod(dims))
    place = places(dims, last_bit_first=True)
    assert in_rounds_s(schedule, dims, place) == pytest.approx(sum(loads(dims)), rel=1e-3)
    assert schedule.num_rounds == log2(prod(dims))


# ---- Swing


def distances(dims: tuple[int, ...]) -> list[int]:
    """Returns the distance between the partners of each step: 1, 1, 3, 5, 11, ... along alternating
    axes.
    """
    count = int(log2(prod(dims)))
    return [abs(1 - (-2) ** (s // len(dims) + 1)) // 3 for s in range(count)]


def congestion(dims: tuple[int, ...]) -> float:
    n, ports = prod(dims), 2 * len(dims)
    return bandwidth_s(f"swing:ports={ports}", dims) / (2 * (n - 1) / n / ports)


@TABLE.has("Swing bandwidth-optimal, multiport")
def test_swing_congestion_follows_from_its_distances() -> None:
    """Tests that step s along an axis loads each link with |delta_s| messages of n / 2^(s+1)."""
    for dims in ((8, 8), (16, 16), (4, 4, 4), (8, 8, 8)):
        form = sum(load / 2 ** (s + 1) for s, load in enumerate(distances(dims)))
        n = prod(dims)
        assert congestion(dims) == pytest.approx(form * n / (n - 1), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "limit"), [((64, 64), 1.200), ((16, 16, 16), 1.037), ((8, 8, 8, 8), 1.0084)]
)
def test_swing_congestion_approaches_its_limits(dims: tuple[int, ...], limit: float) -> None:
    assert congestion(dims) == pytest.approx(limit, rel=0.02)


def whole_vectors_by_swing(dims: tuple[int, ...]) -> Schedule:
    """Builds Swing for short messages, which the registry lacks. Each port has a part of the
    vector, as in `swing` with `ports`, but sends the whole part in every step.
    """
    axes, n = len(dims), prod(dims)
    collective = Collective(op=Op.ALL_REDUCE, ranks=n, parts=2 * axes)
    b = Builder(collective, "swing_of_whole_vectors")
    coords = np.stack(np.unravel_index(np.arange(n), dims))
    for step in range(int(log2(n))):
        delta = (1 - (-2) ** (step // axes + 1)) // 3
        for part in range(2 * axes):
            axis, way = (step + part // 2) % axes, 1 - 2 * (part % 2)
            partner = coords.copy()
            odd = way * np.where(coords[axis] % 2, -1, 1)
            partner[axis] = (coords[axis] + odd * delta) % dims[axis]
            to = np.ravel_multi_index(tuple(partner), dims)
            b.reduce(np.arange(n), part, to, channel=part)
        b.next_round()
    return b.build()


@TABLE.has("Swing latency-optimal")
@pytest.mark.parametrize("dims", [(4, 4), (8, 8), (4, 4, 4)])
def test_swing_of_whole_vectors(dims: tuple[int, ...]) -> None:
    """Compares the time with that of lg N steps, in each of which a link carries |delta_s| messages
    of n / 2D.
    """
    schedule = whole_vectors_by_swing(dims)
    check(schedule)
    assert schedule.num_rounds == log2(prod(dims))
    form = sum(distances(dims)) / (2 * len(dims))
    assert in_rounds_s(schedule, dims) == pytest.approx(form, rel=1e-3)


def test_every_table_row_is_tested() -> None:
    assert TABLE.tested == TABLE.known

"""Tests of the stated cost of every algorithm against a simulation without congestion."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from unisono import algorithms, simulate, topology
from unisono.algorithms.cost import whole_chunks
from unisono.errors import UnsupportedError
from unisono.schedule import Schedule
from unisono.simulator import Conditions, Endpoint, Order
from unisono.topology import Cable, LinkKind
from unisono.types import Op

ALPHA_S, RATE_BPS, REDUCE_BPS, N = 1e-6, 1e9, 4e9, float(1 << 20)
RANKS = (2, 3, 4, 5, 8, 13, 16)
EVERY = [(op, name) for op in Op for name in algorithms.names(op) if op is not Op.BARRIER]


def time_s(schedule: Schedule, order: Order, reduce_Bps: float) -> float:
    cable = Cable(bandwidth_Bps=1e18, latency_s=ALPHA_S, kind=LinkKind.OTHER)
    net = topology.mesh(schedule.collective.ranks, cable=cable)
    ends = Endpoint(send_Bps=RATE_BPS, reduce_Bps=reduce_Bps)
    return simulate(schedule, net, N, conditions=Conditions(endpoint=ends, order=order)).time_s


def most_by_round(schedule: Schedule, reductions: bool) -> float:
    """Returns the bytes that the busiest rank of each round sends (or reduces), summed over all
    rounds, in units of N.
    """
    c = schedule.columns
    rows = (c.src != c.dst) & (c.reduce if reductions else True)
    ranks = schedule.collective.ranks
    side = (c.dst if reductions else c.src)[rows]
    total = np.zeros((schedule.num_rounds, ranks))
    np.add.at(total, (c.round[rows], side), c.count[rows])
    return float(total.max(axis=1, initial=0).sum()) / whole_chunks(schedule.collective)


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_the_stated_cost_equals_the_simulated_cost(op: Op, name: str) -> None:
    """Simulates round by round. The time equals the closed form if the same rank is the busiest in
    every round. Otherwise it lies between the busiest rank's own total and the sum of the rounds'
    maxima.
    """
    for ranks in RANKS:
        try:
            schedule = algorithms.build(op, name, ranks=ranks)
        except UnsupportedError:
            continue
        cost = algorithms.cost(op, name, ranks=ranks)
        sent, reduced = most_by_round(schedule, False), most_by_round(schedule, True)
        found = algorithms.find(op, name)
        without_reductions = time_s(schedule, Order.ROUNDS, inf)
        whole = time_s(schedule, Order.ROUNDS, REDUCE_BPS)
        form = cost.rounds * ALPHA_S + float(cost.bytes_sent) * N / RATE_BPS
        full = form + float(cost.reductions) * N / REDUCE_BPS
        if sent == pytest.approx(float(cost.bytes_sent)) and found.exact and is_even(schedule):
            assert without_reductions == pytest.approx(form, rel=1e-9)
            one_channel = int(schedule.columns.channel.max(initial=0)) == 0
            if reduced == pytest.approx(float(cost.reductions)) and one_channel:
                assert whole == pytest.approx(full, rel=1e-9)
        most = cost.rounds * ALPHA_S + sent * N / RATE_BPS
        assert without_reductions <= most * (1 + 1e-9)
        assert whole <= (most + reduced * N / REDUCE_BPS) * (1 + 1e-9)
        busiest = schedule.chunks_sent_by_rank().max() / whole_chunks(schedule.collective)
        for order in Order:
            assert time_s(schedule, order, inf) >= (busiest * N / RATE_BPS) * (1 - 1e-9)


def is_even(schedule: Schedule) -> bool:
    """Returns True if every rank sends the same amount in every round."""
    c = schedule.columns
    total = np.zeros((schedule.num_rounds, schedule.collective.ranks))
    np.add.at(total, (c.round, c.src), c.count * (c.src != c.dst))
    return bool((total == total[:, :1]).all())


def test_most_algorithms_load_all_ranks_evenly() -> None:
    """Tests that in most algorithms, every rank sends the same amount in every round."""
    even = set()
    for op, name in EVERY:
        schedule = algorithms.build(op, name, ranks=8)
        if is_even(schedule) and algorithms.find(op, name).exact:
            even.add((op, name))
    assert len(even) >= 40

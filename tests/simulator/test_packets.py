"""Tests of the difference between flows and packets; docs/simulator.md lists the numbers."""

from __future__ import annotations

import pytest

import packets
from unisono import algorithms, simulate, topology
from unisono.topology import Cable, LinkKind, Topology

CABLE = Cable(bandwidth_Bps=12.5e9, latency_s=500e-9, kind=LinkKind.ETHERNET)
CASES = {
    "ring on a ring": ("all_reduce", "ring", topology.ring(8, cable=CABLE)),
    "swing on a torus": ("all_reduce", "swing:dims=4x4", topology.torus([4, 4], cable=CABLE)),
    "halving on a torus": ("all_reduce", "halving_doubling", topology.torus([4, 4], cable=CABLE)),
    "exchange on leaf-spine": (
        "all_to_all",
        "pairwise",
        topology.leaf_spine(leaves=4, spines=2, hosts=4, cable=CABLE),
    ),
    "in-cast at a star": ("gather", "direct", topology.star(16, cable=CABLE)),
}
# Largest errors of each case, with messages of 64 KiB, 1 MiB and 8 MiB per rank.
WITHIN = {
    "ring on a ring": (0.001, 0.001, 0.001),
    "swing on a torus": (0.001, 0.001, 0.001),
    "halving on a torus": (0.10, 0.015, 0.003),
    "exchange on leaf-spine": (0.13, 0.015, 0.003),
    "in-cast at a star": (0.07, 0.01, 0.003),
}


def error(op: str, name: str, net: Topology, nbytes: int) -> float:
    schedule = algorithms.build(op, name, ranks=net.num_ranks)
    flows, exact = simulate(schedule, net, nbytes).time_s, packets.time_s(schedule, net, nbytes)
    print(f"{op} {name} on {net.name}, {nbytes} bytes: {flows / exact - 1:+.1%}")
    return abs(flows / exact - 1)


@pytest.mark.parametrize("case", CASES)
def test_flows_are_close_to_packets(case: str) -> None:
    for nbytes, most in zip((1 << 16, 1 << 20), WITHIN[case], strict=False):
        assert error(*CASES[case], nbytes) <= most


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_flows_are_close_to_packets_for_large_messages(case: str) -> None:
    assert error(*CASES[case], 1 << 23) <= WITHIN[case][2]

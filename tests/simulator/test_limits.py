"""Tests of `compare`, which simulates all algorithms: its limits of time and transfers, and the
steps of the results that it keeps.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from unisono import topology
from unisono.simulator import compare
from unisono.simulator.limits import Limits, expected_transfers, fastest_first

_PEAK = """
import resource
from unisono import algorithms, simulate, topology
schedule = algorithms.build("all_reduce", "one_shot", ranks=512)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
simulate(schedule, topology.star(512), 1e6)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


def test_limits_keep_the_times_but_only_the_fastest_steps() -> None:
    net = topology.torus([4, 4])
    whole = compare("all_reduce", net, 1e6)
    some = compare("all_reduce", net, 1e6, limits=Limits())
    summaries = [[(e.algorithm, e.time_s, e.messages) for e in found] for found in (whole, some)]
    assert summaries[0] == summaries[1]
    kept = [e.algorithm for e in some if e.schedule is not None]
    assert kept == [some[0].algorithm]
    assert some[0].result is not None and len(some[0].result.steps) > 0
    assert all(e.result is None or not len(e.result.steps) for e in some[1:])


def test_an_algorithm_that_is_too_large_is_skipped_with_a_reason() -> None:
    found = compare("all_reduce", topology.star(256), 1e6, limits=Limits(transfers=100_000))
    reasons = {entry.algorithm: entry.reason for entry in found if entry.too_large}
    assert reasons["ring"].startswith("skipped: about 126,976 transfers")
    assert next(e for e in found if e.algorithm == "leaders").result is not None


def test_a_simulation_that_takes_too_long_is_aborted() -> None:
    limits = Limits(budget_s=600, part=0)
    found = compare("all_reduce", topology.star(64), 1e6, names=["ring"], limits=limits)
    assert found[0].too_large and found[0].reason == "aborted after 0 s"


@pytest.mark.parametrize("name", ["ring", "direct", "chain", "bucket", "one_shot"])
def test_the_number_of_transfers_is_estimated(name: str) -> None:
    from unisono.algorithms import build

    ranks = 256
    real = len(build("all_reduce", name, ranks=ranks).transfers)
    assert expected_transfers("all_reduce", name, ranks) == pytest.approx(real, rel=0.1)


def test_algorithms_with_few_concurrent_transfers_come_first() -> None:
    order = list(fastest_first("all_reduce", ["direct", "ring", "leaders"], 256))
    assert order == ["leaders", "ring", "direct"]


def test_memory_of_a_large_reduction_does_not_grow_with_each_contribution() -> None:
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, check=True, text=True)
    assert int(done.stdout) < 220 << 20

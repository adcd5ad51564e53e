"""The cost model of several hosts: predictions for given links."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_layouts import layouts, regular
from unisono.algorithms import build
from unisono.algorithms.host_layout import Hosts
from unisono.schedule import Builder
from unisono.selection.network_cost_model import (
    GIGABIT,
    Demands,
    NetworkConstants,
    candidates,
    fastest_between,
    line_between,
    predict_on,
)
from unisono.selection.one_host_cost_model import predict
from unisono.types import Op


def chosen(op: Op, hosts: Hosts, nbytes: int, network: NetworkConstants = GIGABIT) -> str:
    parts = fastest_between(op, hosts=hosts, cores=4, network=network)
    return [part.algorithm for part in parts if part.least <= nbytes][-1]


@pytest.mark.parametrize("hosts", [regular(4, 1), regular(2, 2), regular(4, 2)])
def test_a_long_all_reduce_is_limited_only_by_the_link(hosts: Hosts) -> None:
    count, nbytes = len(hosts), 16 << 20
    name = chosen(Op.ALL_REDUCE, hosts, nbytes)
    limit_s = 2 * (count - 1) / count * nbytes * GIGABIT.byte_s
    assert limit_s < predict_on(Op.ALL_REDUCE, name, nbytes, hosts=hosts, cores=4) < 1.06 * limit_s


@pytest.mark.parametrize("hosts", [regular(4, 1), regular(4, 2), ((0, 3), (1,), (2,))])
def test_a_short_all_reduce_has_one_round_between_hosts(hosts: Hosts) -> None:
    name = chosen(Op.ALL_REDUCE, hosts, 8)
    assert name == "leaders"
    once_s = GIGABIT.latency_s + 2 * len(hosts) * (GIGABIT.message_s + GIGABIT.host_message_s)
    assert predict_on(Op.ALL_REDUCE, name, 8, hosts=hosts, cores=4) < once_s + 20e-6


def test_a_slower_link_lowers_the_size_at_which_bytes_decide() -> None:
    hosts = regular(4, 2)

    def border(network: NetworkConstants) -> int:
        parts = fastest_between(Op.BROADCAST, hosts=hosts, cores=4, network=network)
        return next(part.least for part in parts if part.algorithm == "by_host")

    assert (
        border(NetworkConstants(byte_s=1 / 1e9))
        > border(GIGABIT)
        > border(NetworkConstants(latency_s=5e-6))
    )


@given(st.sampled_from(Op), layouts(6), st.integers(0, 1 << 24), st.booleans())
def test_the_fastest_is_the_least_of_all_predictions(
    op: Op, hosts: Hosts, nbytes: int, in_rank_order: bool
) -> None:
    demands = Demands(in_rank_order=in_rank_order)
    times = {
        name: line_between(op, name, hosts=hosts, cores=2, demands=demands).at(nbytes)
        for name in candidates(op, demands)
    }
    parts = fastest_between(op, hosts=hosts, cores=2, demands=demands)
    name = [part.algorithm for part in parts if part.least <= nbytes][-1]
    assert times[name] <= min(times.values()) * (1 + 1e-9) + 1e-6


def test_both_models_agree_on_one_host() -> None:
    alone = predict_on("all_reduce", "direct", 4096, hosts=((0, 1, 2),), cores=2)
    assert alone == predict("all_reduce", "direct", 3, 4096, cores=2)


@pytest.mark.parametrize(
    ("op", "name"),
    [(Op.ALL_REDUCE, "rank_order"), (Op.ALL_REDUCE, "by_host"), (Op.BROADCAST, "by_host")],
)
def test_a_schedule_for_256_hosts_is_built_in_few_steps(
    op: Op, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests that a schedule for 256 hosts needs fewer than five steps of the builder per host. A
    communicator's first call builds all candidates to compute their costs, and one step per pair of
    hosts would take ten seconds.
    """
    steps = 0
    add = Builder._add

    def counted(self: Builder, *row: Any) -> None:
        nonlocal steps
        steps += 1
        add(self, *row)

    monkeypatch.setattr(Builder, "_add", counted)
    build(op, name, ranks=256, hosts=regular(256, 1))
    assert steps < 5 * 256

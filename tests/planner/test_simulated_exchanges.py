"""Exchanges on given networks, compared with closed forms for these networks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from unisono import planner, topology
from unisono.planner.constants.calibrated_constants import default_constants
from unisono.planner.step_times.exchange_times import ExchangeTimes
from unisono.planner.step_times.simulated_exchanges import SimulatedExchanges

CONSTANTS = default_constants().changed(network_share=1.0, exchange_share=1.0)


def simulated(network: topology.Topology) -> SimulatedExchanges:
    cluster = planner.Cluster(device="a100", devices=network.num_ranks, topology=network)
    return SimulatedExchanges(cluster, CONSTANTS)


def byte_s(exchanges: ExchangeTimes, ranks: int, stride: int) -> float:
    """Returns the seconds per byte of an all_reduce."""
    group = exchanges.place(ranks, stride)
    return exchanges.all_reduce_s(1.0, group) - exchanges.all_reduce_s(0.0, group)


def test_rings_along_a_torus_use_its_links() -> None:
    """Tests a 4 x 4 torus, in which rings along rows or columns do not share links."""
    rate = 50e9
    exchanges = simulated(topology.torus([4, 4]))
    for stride in (1, 4):
        assert byte_s(exchanges, 4, stride) == pytest.approx(2 * 3 / 4 / rate, rel=1e-3)


def test_groups_share_an_oversubscribed_network() -> None:
    """Tests eight rings that share a spine. With an oversubscription of 4, they take four times as
    long as without oversubscription.
    """
    full, thin = (
        topology.leaf_spine(leaves=2, spines=1, hosts=8, oversubscription=ratio)
        for ratio in (1.0, 4.0)
    )
    wide, narrow = (byte_s(simulated(network), 2, 8) for network in (full, thin))
    assert narrow == pytest.approx(4 * wide, rel=1e-3)
    inside = byte_s(simulated(thin), 8, 1)
    assert inside < narrow


def test_every_device_is_in_one_group() -> None:
    exchanges = simulated(topology.torus([4, 4]))
    for ranks, stride in ((4, 1), (4, 4), (2, 8), (16, 1), (2, 2)):
        groups = list(exchanges._groups(exchanges.place(ranks, stride)))
        assert sorted(device for group in groups for device in group) == list(range(16))


def test_predictions_on_a_network(tmp_path: Path) -> None:
    """Tests that a slower network makes a layout slower, and that a flat network needs no
    simulation.
    """
    model = planner.load_model("gpt3-1.7b")
    layout = planner.Layout(dp=8, tp=2, zero=1)
    job = planner.Workload(seq=2048, global_batch=64, micro_batch=2, recompute="full")
    steps = []
    for bandwidth in ("400Gbit", "40Gbit"):
        path = tmp_path / "cluster.json"
        spec = f"torus:4x4,bandwidth={bandwidth}"
        path.write_text(json.dumps({"device": "a100", "devices": 16, "topology": spec}))
        cluster = planner.Cluster.load(path)
        steps.append(planner.predict(model, cluster, layout, job).step_s)
    assert steps[1] > steps[0]
    with pytest.raises(ValueError, match="the topology has 16 ranks, but the cluster has 8"):
        replace(cluster, devices=8)


def test_experts_on_a_network() -> None:
    cluster = planner.Cluster(device="h100", devices=16, topology=topology.torus([4, 4]))
    found = planner.predict(
        planner.load_model("qwen3-30b-a3b"),
        cluster,
        planner.Layout(dp=8, pp=2, ep=8, zero=1),
        planner.Workload(seq=4096, global_batch=64, micro_batch=1),
    )
    assert found.time["expert"] > 0 and found.time["send"] > 0


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_first_and_last_stage_sum_a_tied_embedding(pp: int, precision: str) -> None:
    """Tests that device i of the first stage is paired with device i of the last stage, for any
    number of stages.
    """
    exchanges = simulated(topology.torus([4, 4]))
    stride = 16 // pp * (pp - 1)
    pairs = list(exchanges._groups(exchanges.place(2, stride)))
    assert pairs == [(i, i + stride) for i in range(16 // pp)]
    cluster = planner.Cluster(device="a100", devices=16, topology=topology.torus([4, 4]))
    step = planner.predict(
        planner.load_model("gpt3-1.7b"),
        cluster,
        planner.Layout(dp=16 // pp, pp=pp),
        planner.Workload(
            seq=2048, global_batch=64, micro_batch=1, recompute="full", precision=precision
        ),
    )
    assert step.time["gradients"] > 0


def test_other_constants_use_the_same_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that exchanges with other constants equal new exchanges, without a new simulation."""
    now = simulated(topology.torus([4, 4]))
    other = CONSTANTS.changed(network_share=0.5, exchange_share=0.25, link_start_s=1e-3)
    fresh = SimulatedExchanges(now._cluster, other)

    def times(exchanges: SimulatedExchanges) -> list[float]:
        group = exchanges.place(4, 4)
        return [
            exchanges.all_reduce_s(1e6, group),
            exchanges.route_s(1e6, 2, group),
            exchanges.send_s(1e6, 4),
        ]

    first, expected = times(now), times(fresh)
    monkeypatch.setattr(SimulatedExchanges, "_line", None)
    found = times(now.with_constants(other))
    assert found == expected and found != first

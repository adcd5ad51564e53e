"""Hybrid sharding: ZeRO inside groups of hosts, whose gradients are summed over the replicas."""

from __future__ import annotations

import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants

MODEL = planner.load_model("llama3-8b")
JOB = planner.Workload(seq=4096, global_batch=32, micro_batch=1, recompute="full")


def shards_s(network_Bps: float, copies: int, zero: int = 3) -> float:
    cluster = planner.Cluster(device="h100", devices=16, network_Bps=network_Bps)
    layout = planner.Layout(dp=16, zero=zero, dp_replicate=copies)
    return planner.predict(MODEL, cluster, layout, JOB).time["shards"]


@pytest.mark.parametrize("zero", [2, 3])
def test_replicas_sum_the_shards_of_gradients(zero: int) -> None:
    """Tests the time on a network that nothing hides: each layer of each of two microbatches sums
    an eighth of its gradients over two hosts.
    """
    rate = 1e8
    share = default_constants().network_share
    layer = MODEL.dense_layer_parameters
    sums_s = 2 * MODEL.layers * (2 * 1 / 2 * 2 * layer / 8) / (rate * share)
    more_s = shards_s(rate, 2, zero) - shards_s(2 * rate, 2, zero)
    assert more_s == pytest.approx(sums_s / 2, rel=1e-6)


def test_a_slow_network_prefers_replicas() -> None:
    """Tests that a search finds shards within a host, and the reason: without replicas, the slow
    network carries all weights three times.
    """
    assert shards_s(2e9, 2) < shards_s(2e9, 1)
    cluster = planner.Cluster(device="h100", devices=16, network_Bps=2e9)
    small = planner.load_model("llama3.2-1b")
    found = planner.search(small, cluster, JOB, keep=50, folded=False)
    copies = {each.layout.dp_replicate for each in found if each.layout.zero == 3}
    assert 2 in copies
    for each in found:
        assert planner.predict(small, cluster, each.layout, each.job).step_s == pytest.approx(
            each.prediction.step_s
        )

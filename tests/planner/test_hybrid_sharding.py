"""Hybrid sharding: ZeRO inside groups of hosts, whose gradients are summed over the replicas."""

from __future__ import annotations

import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants

MODEL = planner.load_model("llama3-8b")
JOB = planner.Workload(seq=4096, global_batch=32, micro_batch=1, recompute="full")


def step(network_Bps: float, copies: int, zero: int = 3) -> planner.Prediction:
    cluster = planner.Cluster(device="h100", devices=16, network_Bps=network_Bps)
    layout = planner.Layout(dp=16, zero=zero, dp_replicate=copies)
    return planner.predict(MODEL, cluster, layout, JOB)


@pytest.mark.parametrize("zero", [2, 3])
def test_replicas_sum_the_shards_of_gradients(zero: int) -> None:
    """Tests the time on a network that nothing hides: each device sums an eighth of the gradients
    of all layers over two hosts, in 2 or 4 bytes, once a step or in each of two microbatches.
    """
    rate = 1e8
    share = default_constants().network_share
    once_s = 2 * 1 / 2 * 2 * MODEL.layers * MODEL.dense_layer_parameters / 8 / (rate * share)
    times = [step(each, 2, zero).time for each in (rate, 2 * rate)]
    more_s = sum(times[0][kind] - times[1][kind] for kind in ("shards", "gradients"))
    assert once_s / 2 < 1.001 * more_s < 5 * once_s / 2


def test_a_slow_network_prefers_replicas() -> None:
    """Tests that shards within a host are faster if a slow network would carry all weights, and
    that a search considers them.
    """
    assert step(2e9, 2).step_s < step(2e9, 1).step_s
    cluster = planner.Cluster(device="h100", devices=16, network_Bps=2e9)
    small = planner.load_model("llama3.2-1b")
    found = planner.search(small, cluster, JOB, keep=10**5, folded=False)
    copies = {each.layout.dp_replicate for each in found if each.layout.zero == 3}
    assert copies == {1, 2}
    for each in found[:50]:
        assert planner.predict(small, cluster, each.layout, each.job).step_s == pytest.approx(
            each.prediction.step_s
        )

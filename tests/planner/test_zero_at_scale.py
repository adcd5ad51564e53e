"""ZeRO-2 and 3 on many hosts: rounds of rings, float32 sums, replicas, and exposed exchanges."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants
from unisono.planner.step_times.exchange_times import ExchangeTimes
from unisono.planner.step_times.step_time import StepModel

MODEL = planner.load_model("llama3-8b")
JOB = planner.Workload(seq=4096, global_batch=4096, micro_batch=1, recompute="none")
NETWORK, LINK, ROUND, START = 1e-5, 5e-6, 2e-6, 2e-5
CONSTANTS = default_constants().changed(
    network_start_s=NETWORK, link_rank_s=LINK, round_s=ROUND, link_start_s=START,
    network_share=1.0, link_share=1.0, straggler=0.0,
)  # fmt: skip


@pytest.mark.parametrize("hosts", [2, 16, 192, 2048])
def test_a_ring_has_a_round_for_each_rank_and_a_tree_has_not(hosts: int) -> None:
    """Compares start-up times with the counts of rounds of NCCL: a ring of n hosts of 8 leaves a
    host n - 1 times, and a tree log2(n) times.
    """
    cluster = planner.Cluster(device="h100", devices=8 * hosts)
    exchanges = ExchangeTimes(cluster, CONSTANTS)
    place = exchanges.place(8 * hosts, 1)
    inside = START + 7 * LINK
    assert exchanges.all_reduce_s(0, place) == pytest.approx(inside + NETWORK * log2(hosts))
    rounds = NETWORK * (hosts - 1) + ROUND * 7 * (hosts - 1)
    assert exchanges.gather_s(0, place) == pytest.approx(inside + rounds)
    whole = exchanges.place(8, 1)
    assert exchanges.gather_s(0, whole) == exchanges.all_reduce_s(0, whole) == inside


def test_utilisation_falls_with_the_number_of_devices() -> None:
    """Tests what published runs show: full shards of a small model scale badly over 1,024 ranks,
    and shards within a host scale well.
    """
    found = {}
    for replicas in (1, 128):
        for devices in (64, 1024):
            job = replace(JOB, global_batch=devices)
            count = replicas * devices // 1024 or 1
            layout = planner.Layout(dp=devices, zero=3, dp_replicate=count)
            step = planner.predict(MODEL, f"a100:{devices}", layout, job)
            found[replicas, devices] = step.mfu
    assert found[1, 1024] < 0.92 * found[1, 64]
    assert found[128, 1024] > 0.95 * found[128, 64]
    assert found[128, 1024] > found[1, 1024]


def _shards(
    layout: planner.Layout, states: str, link_Bps: float = 1e8, **constants: float
) -> float:
    free = CONSTANTS.changed(
        network_start_s=0.0, link_rank_s=0.0, round_s=0.0, link_start_s=0.0, **constants
    )
    cluster = planner.Cluster(
        device="h100", devices=16, per_host=1, network_Bps=1e8, link_Bps=link_Bps
    )
    job = replace(JOB, global_batch=16, states=states)
    return planner.predict(MODEL, cluster, layout, job, constants=free).time["shards"]


@pytest.mark.parametrize(("zero", "gathers"), [(2, 1), (3, 2)])
def test_bytes_of_shards(zero: int, gathers: int) -> None:
    """Compares exchanges that compute slows by their whole time (overlap_slowdown = 1) with closed
    forms: weights in 16 bits, gradients in float32 or 16 bits, of all layers and the embeddings.
    """
    layers = MODEL.layers * MODEL.dense_layer_parameters
    outer = 2 * MODEL.vocab * MODEL.hidden
    for states, reduced in (("mixed", 4), ("bf16-gradients", 2)):
        found = _shards(planner.Layout(dp=16, zero=zero), states, overlap_slowdown=1.0)
        moved = (2 * gathers + reduced) * layers + (2 + reduced) * outer
        assert found == pytest.approx(15 / 16 * moved / 1e8, rel=1e-3)


def test_replicas_sum_their_shards() -> None:
    """Tests HSDP: 4 replicas of 4 shards also all_reduce a quarter of the gradients."""
    whole = MODEL.layers * MODEL.dense_layer_parameters + 2 * MODEL.vocab * MODEL.hidden
    shards = planner.Layout(dp=16, zero=3, dp_replicate=4)
    found = _shards(shards, "mixed", overlap_slowdown=1.0)
    layers = MODEL.layers * MODEL.dense_layer_parameters
    gathered = 3 / 4 * (6 * whole + 2 * layers)
    summed = 2 * 3 / 4 * 4 * whole / 4
    assert found == pytest.approx((gathered + summed) / 1e8, rel=1e-3)


def test_exchanges_slow_compute_by_the_bytes_that_they_move() -> None:
    """Tests groups with one, two and all devices of each host: a ring between hosts is as fast as
    the network of its devices in a host, and at most as fast as the links.
    """
    cluster = planner.Cluster(device="h100", devices=64, link_Bps=4e8, network_Bps=1e8)
    exchanges = ExchangeTimes(cluster, CONSTANTS)
    for local, use in ((1, 1 / 4), (2, 1 / 2), (4, 1.0), (8, 1.0)):
        place = exchanges.place(8 * local, 8 // local)
        assert place.local == local
        assert exchanges.link_use(place) == pytest.approx(use)
    assert exchanges.link_use(exchanges.place(8, 1)) == pytest.approx(1)
    model = replace(MODEL, tied=False)
    job = replace(JOB, global_batch=64)
    found = []
    for tp in (8, 1):
        layout = planner.Layout(dp=64 // tp, tp=tp, zero=1)
        times = [
            planner.predict(
                model, cluster, layout, job, constants=CONSTANTS.changed(overlap_slowdown=slowdown)
            ).time["gradients"]
            for slowdown in (0.0, 0.5, 1.0)
        ]
        assert times[0] < times[1] < times[2]
        found.append((times[2] - times[0]) / (times[1] - times[0]))
    assert found == pytest.approx([2, 2])


def test_replicas_are_part_of_what_is_known_about_a_layer() -> None:
    """Tests one model of a workload with two layouts of equal shards: their times do not mix."""
    cluster = planner.Cluster(device="h100", devices=16, per_host=1, network_Bps=1e8)
    job = replace(JOB, global_batch=16)
    small = planner.Layout(dp=8, zero=3, dp_replicate=2)
    large = planner.Layout(dp=16, zero=3, dp_replicate=4)
    alone = StepModel(MODEL, cluster, job, CONSTANTS).step(large, 1, "none")
    times = StepModel(MODEL, cluster, job, CONSTANTS)
    assert times.step(small, 1, "none")["shards"] != alone["shards"]
    assert times.step(large, 1, "none") == alone


def test_nothing_hides_the_first_and_the_last_exchange() -> None:
    """Tests free overlap: the embeddings' exchanges and those of one layer remain."""
    fast = planner.Cluster(device="h100", devices=16, per_host=1, link_Bps=1e13, network_Bps=1e13)
    free = CONSTANTS.changed(
        network_start_s=0.0, link_rank_s=0.0, round_s=0.0, link_start_s=0.0, overlap_slowdown=0.0
    )
    job = replace(JOB, global_batch=16)
    found = planner.predict(MODEL, fast, planner.Layout(dp=16, zero=3), job, constants=free)
    moved = 6 * (2 * MODEL.vocab * MODEL.hidden + MODEL.dense_layer_parameters)
    assert found.time["shards"] == pytest.approx(15 / 16 * moved / 1e13, rel=1e-3)

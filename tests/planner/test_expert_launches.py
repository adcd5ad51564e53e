"""Times of the host for layers with experts, and the software that hides expert exchanges."""

from __future__ import annotations

import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants

MODEL = planner.Transformer(
    layers=4, hidden=2048, heads=16, ffn=8192, gated=True, vocab=32000, tied=False,
    experts=64, top_k=4, expert_ffn=1024,
)  # fmt: skip
DEVICES, MICROBATCHES, PASSES = 16, 8, 2


def step(
    ep: int, *, seq: int = 1024, software: str | None = None, **constants: float
) -> planner.Prediction:
    """Predicts a step in which each device has one sequence in a microbatch."""
    cluster = planner.Cluster(device="h100", devices=DEVICES, per_host=DEVICES)
    job = planner.Workload(
        seq=seq, global_batch=DEVICES * MICROBATCHES, micro_batch=1, recompute="none",
        software=software,
    )  # fmt: skip
    chosen = default_constants().changed(straggler=0.0, **constants)
    return planner.predict(
        MODEL, cluster, planner.Layout(dp=DEVICES, ep=ep, zero=1), job, constants=chosen
    )


@pytest.mark.parametrize("ep", [4, 16])
def test_each_expert_of_a_device_is_launched(ep: int) -> None:
    """If the host needs longer than the device, the step has the time to launch the experts of a
    device in all passes.
    """
    slow, slower = (step(ep, expert_launch_s=seconds).step_s for seconds in (0.01, 0.02))
    launches = MICROBATCHES * MODEL.layers * PASSES * MODEL.experts / ep
    assert slower - slow == pytest.approx(0.01 * launches, rel=1e-6)


def test_the_host_waits_for_the_number_of_tokens() -> None:
    """Tests a layer whose host needs less time than its device, but more time to launch its experts
    than the device needs for the tokens' way to them and for their products. The device waits for
    the difference in each forward pass, and not in the backward pass.
    """
    ep, seq = 4, 4096
    free = step(ep, seq=seq, expert_launch_s=0.0, launch_s=0.0)
    assert free.time["host"] == 0
    layers = MICROBATCHES * MODEL.layers
    device_s = sum(free.time[k] for k in ("matmul", "attention", "memory", "expert")) / layers
    shares = (0.01, 0.40, 0.45)  # of the device's time; both passes together are less than it
    waits = []
    for share in shares:
        launch_s = share * device_s / (MODEL.experts / ep)
        found = step(ep, seq=seq, expert_launch_s=launch_s, launch_s=0.0)
        waits.append(found.time["host"] / layers / device_s)
    assert waits[0] == 0 and 0 < waits[1] < shares[1]
    assert waits[2] - waits[1] == pytest.approx(shares[2] - shares[1], rel=1e-6)
    # Without the way of the tokens, half of the exchange of a pass, the device waits longer.
    near = {"link_share": 1e9, "link_start_s": 0.0, "link_rank_s": 0.0}
    found = step(ep, seq=seq, expert_launch_s=launch_s, launch_s=0.0, **near)
    way_s = free.time["expert"] / layers / PASSES / 2
    longer_s = found.time["host"] / layers - waits[2] * device_s
    assert longer_s == pytest.approx(way_s, rel=1e-6)


def test_the_newest_software_hides_launches_and_exchanges() -> None:
    """Tests that one CUDA graph needs no host time, and that an exchange costs only the slowdown of
    the compute beside it.
    """
    slow = {"expert_launch_s": 0.01, "launch_s": 0.01}
    old, new = (step(16, software=name, **slow) for name in ("transformer-engine", "megatron-2026"))
    assert old.time["host"] > 0 and new.time["host"] == 0
    share = new.time["expert"] / old.time["expert"]
    assert share == pytest.approx(default_constants().overlap_slowdown, rel=1e-6)
    same = ("matmul", "attention", "memory", "output", "optimizer")
    assert [new.time[kind] for kind in same] == [old.time[kind] for kind in same]
    assert step(16, software="megatron-2026", overlap_slowdown=0.0).time["expert"] == 0

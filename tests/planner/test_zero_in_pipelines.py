"""ZeRO-2 and 3 in pipelines: whole weights and gradients during a step, one exchange of each."""

from dataclasses import replace

import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants

MODEL = replace(planner.load_model("llama3-8b"), tied=False)
RATE = 1e9
CLUSTER = planner.Cluster(device="h100", devices=8, per_host=1, network_Bps=RATE)
CONSTANTS = default_constants().changed(
    network_share=1.0, network_start_s=0.0, link_start_s=0.0, overlap_slowdown=0.0, straggler=0.0
)


def predict(zero: int, batch: int) -> planner.Prediction:
    layout = planner.Layout(dp=4, pp=2, zero=zero)
    job = planner.Workload(seq=1024, global_batch=batch, micro_batch=1, recompute="none")
    return planner.predict(MODEL, CLUSTER, layout, job, constants=CONSTANTS)


def stage_parameters() -> float:
    return 16 * MODEL.dense_layer_parameters + MODEL.vocab * MODEL.hidden


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("batch", [8, 64])
def test_gradients_and_weights_are_exchanged_once(zero: int, batch: int) -> None:
    """Compares with the time of one reduce_scatter of a stage in float32 and one all_gather in 16
    bits, less the part that the last microbatch hides, for any number of microbatches.
    """
    found = predict(zero, batch)
    whole_s = (3 / 4) * (4 + 2) * stage_parameters() / RATE
    compute = ("matmul", "attention", "memory", "host", "output", "send")
    window_s = sum(found.time[kind] for kind in compute) / (batch / 4)
    assert found.time["shards"] == 0.0
    assert found.time["gradients"] == pytest.approx(whole_s - window_s, rel=0.02)
    assert window_s < 0.4 * whole_s


@pytest.mark.parametrize("zero", [2, 3])
def test_a_stage_keeps_whole_weights_and_gradients(zero: int) -> None:
    """Tests 2 bytes of weight, 4 of gradient, and 12 / dp of float32 weight and moments."""
    memory = predict(zero, 8).memory
    expected = (stage_parameters() * each for each in (2, 4, 12 / 4))
    for name, nbytes in zip(("weights", "gradients", "optimizer"), expected, strict=True):
        assert memory[name][0] == pytest.approx(nbytes, rel=1e-4), name
    assert memory["exchange buffers"][0] == 0.0


def test_without_a_pipeline_each_microbatch_exchanges() -> None:
    job = planner.Workload(seq=1024, global_batch=64, micro_batch=1, recompute="none")
    layout = planner.Layout(dp=8, zero=3)
    times = [
        planner.predict(MODEL, CLUSTER, layout, replace(job, global_batch=batch)).time["shards"]
        for batch in (8, 64)
    ]
    assert times[1] == pytest.approx(8 * times[0])

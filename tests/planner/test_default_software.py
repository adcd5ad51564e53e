"""The software that a layout has on a device if the workload does not state it."""

from dataclasses import replace
from typing import Any

import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants

MODEL = planner.load_model("gpt3-22b")
JOB = planner.Workload(seq=2048, global_batch=64, micro_batch=1, recompute="none")
SEQUENCE = {"tp": 8, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("device", "precision", "axes", "software"),
    [
        ("a100", "bf16", {"tp": 8}, "transformer-engine"),
        ("a100", "bf16", SEQUENCE, "transformer-engine"),
        ("a100", "bf16", {"dp": 8, "zero": 3}, "torch-fsdp"),
        ("a100", "fp16", {"pp": 8}, "transformer-engine"),
        ("v100", "fp16", SEQUENCE, "transformer-engine"),
        ("h100", "bf16", {"dp": 4, "tp": 2, "zero": 2}, "torch-fsdp"),
        ("gb200", "fp8", {"pp": 8}, "transformer-engine"),
    ],
)
def test_default_software(device: str, precision: str, axes: dict[str, Any], software: str) -> None:
    """Compares a prediction that does not state the software with one that states it."""
    cluster = planner.Cluster(device=device, devices=8)
    layout, job = planner.Layout(**axes), replace(JOB, precision=precision)
    found = planner.predict(MODEL, cluster, layout, job)
    stated = planner.predict(MODEL, cluster, layout, replace(job, software=software))
    assert found.time == stated.time and found.memory == stated.memory
    for other in {"megatron-2021", "transformer-engine", "torch-fsdp"} - {software}:
        changed = planner.predict(MODEL, cluster, layout, replace(job, software=other))
        assert changed.step_s != found.step_s


def test_no_layout_escapes_old_software() -> None:
    """Tests that tensor and context parallelism of one device count have almost equal attention:
    the planner assumes the same software for both. A ring's kernels are shorter, hence slower.
    """
    cluster = planner.Cluster(device="a100", devices=2)
    model = planner.load_model("llama3-8b")
    job = planner.Workload(seq=2048, global_batch=8, micro_batch=1, recompute="full")
    one, two = (planner.Layout(**{axis: 2}) for axis in ("tp", "cp"))
    steps = [
        planner.predict(model, cluster, layout, job).time["attention"] for layout in (one, two)
    ]
    assert steps[0] < steps[1] < 1.25 * steps[0]


def test_the_search_finds_the_software_of_each_layout() -> None:
    """Tests that no layout of a search keeps the time of another layout's software."""
    job = planner.Workload(seq=2048, global_batch=64, micro_batch=1)
    cluster = planner.Cluster(device="a100", devices=16)
    for each in planner.search(MODEL, cluster, job, keep=20):
        again = planner.predict(MODEL, cluster, each.layout, each.prediction.job)
        assert again.step_s == pytest.approx(each.prediction.step_s, rel=1e-12)


def test_deepspeed_is_slower_in_its_layers() -> None:
    """Tests that only the layers' times differ from Megatron-LM's, by the constant."""
    cluster, layout = planner.Cluster.parse("a100:16"), planner.Layout(dp=2, tp=8, zero=1)
    constants = default_constants().changed(straggler=0.0)
    times = [
        planner.predict(
            MODEL, cluster, layout, replace(JOB, software=name), constants=constants
        ).time
        for name in ("megatron-2021", "megatron-deepspeed")
    ]
    for kind in ("matmul", "attention", "memory", "tensor"):
        assert times[0][kind] == pytest.approx(times[1][kind] * constants.deepspeed_share), kind
    for kind in ("output", "gradients", "optimizer", "step"):
        assert times[0][kind] == times[1][kind], kind
    assert constants.deepspeed_share < 1

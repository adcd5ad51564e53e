"""Start-up times of kernels: as many as the software launches, and none of a whole graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants
from unisono.planner.step_times.step_time import StepModel

CONSTANTS = default_constants().changed(straggler=0.0, launch_s=0.0, memory_share=1e9)
MODEL = planner.load_model("llama3-8b")
JOB = planner.Workload(seq=1024, global_batch=8, micro_batch=1, recompute="none")


@pytest.mark.parametrize(
    ("software", "kernels"), [("torch-fsdp", 9), ("torch-eager", 12 + 2 + 14 + 2)]
)
def test_start_up_times_of_the_kernels_between_products(software: str, kernels: int) -> None:
    """Compares the time without the rate of memory with the number of kernels: two norms, two sums,
    four to split and rotate heads, and an activation; in PyTorch without torch.compile, six of each
    norm, fourteen to rotate, and two of the activation. The backward pass has twice as many.
    """
    job = replace(JOB, software=software)
    found = planner.predict(MODEL, "h100:8", planner.Layout(dp=8), job, constants=CONSTANTS)
    expected = 3 * kernels * MODEL.layers * CONSTANTS.kernel_start_s
    assert found.time["memory"] == pytest.approx(expected, rel=1e-3)


def test_a_step_that_is_one_graph_has_no_host_time() -> None:
    steps = {
        software: planner.predict(
            MODEL, "b200:8", planner.Layout(dp=8, zero=1), replace(JOB, software=software)
        ).time
        for software in ("transformer-engine", "megatron-2026", "megatron-2022")
    }
    constants = default_constants()
    assert steps["megatron-2026"]["step"] == 0.0
    assert steps["transformer-engine"]["step"] == constants.step_s
    assert steps["megatron-2022"]["step"] == constants.eager_step_s


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 8)])
def test_the_inputs_of_each_expert_are_converted(tp: int, ep: int) -> None:
    """Compares the bytes of conversions to fp8, 2 read and 2 written for each value, with the
    inputs of all products of a layer with experts: top_k copies of each token, and their values
    inside of the experts.
    """
    model = planner.load_model("qwen3-30b-a3b")
    layout = planner.Layout(dp=8 // tp, tp=tp, ep=ep, zero=1, sequence_parallel=tp > 1)
    job = replace(JOB, precision="fp8")
    times = StepModel(model, planner.Cluster.parse("h100:8"), job, CONSTANTS)
    found = times.layers.operators(times.shape(layout, 1, experts=True))
    [conversion] = [each for each in found if each.name == "conversion"]
    h, width = model.hidden, model.heads * model.head_dim
    routed = model.top_k * (h / (tp if ep > 1 else 1) + model.expert_ffn / tp)
    assert conversion.nbytes == pytest.approx(1024 * 4 * (h + width / tp + routed))

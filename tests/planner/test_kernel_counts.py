"""Start-up times of kernels: as many as the software launches, and none of a whole graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants

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

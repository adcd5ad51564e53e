"""PyTorch without torch.compile: bytes of its kernels, and published pairs of runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono import planner
from unisono.planner.validation.predicted_runs import fold_constants

LLAMA = planner.load_model("llama3-8b")


def memory_s(model: planner.Transformer, software: str) -> float:
    """Returns the seconds of kernels between matrix products, without their start-up times."""
    job = planner.Workload(
        seq=4096, global_batch=8, micro_batch=1, recompute="none", software=software
    )
    constants = planner.default_constants().changed(kernel_start_s=0.0, straggler=0.0)
    layout = planner.Layout(dp=8, zero=3)
    return planner.predict(model, "h100:8", layout, job, constants=constants).time["memory"]


def test_bytes_of_eager_kernels() -> None:
    """Compares the additional time with a count of bytes per token."""
    constants = planner.default_constants()
    h, keys, inner = 4096, 1024, 14336
    norms = 2 * (6 + 8 + 4 + 8 + 8 + 6) - 8
    rotary = 6 + 8 + 6 - 4
    nbytes = norms * h + rotary * (h + keys) + (4 + 6 - 6) * inner
    device = planner.device_named("h100")
    rate = device.memory_Bps * constants.memory_share / constants.traffic
    # one microbatch of 4,096 tokens, 32 layers, a backward pass of twice the time
    expected = 3 * 32 * 4096 * nbytes / rate
    assert memory_s(LLAMA, "torch-eager") - memory_s(LLAMA, "torch-fsdp") == pytest.approx(expected)


def test_a_gpt_has_the_same_kernels() -> None:
    """Tests a model with LayerNorm, GELU and learned positions: one kernel each in both."""
    gpt = planner.load_model("gpt3-3.6b")
    assert memory_s(gpt, "torch-eager") == pytest.approx(memory_s(gpt, "torch-fsdp"))


def test_published_pairs_with_and_without_compile() -> None:
    """Compares the ratio of both times with torchtitan's on 8 and on 128 devices. No constant was
    fitted to torchtitan's runs.
    """
    constants = fold_constants()["torchtitan"]
    runs = [run for run in planner.measured_runs() if run.family == "torchtitan"]
    eager = [run for run in runs if run.job.software == "torch-eager"]
    assert [run.note for run in eager] == ["FSDP8", "FSDP128"]
    for run in eager:
        compiled = replace(run.job, software=None)
        [pair] = [each for each in runs if (each.cluster, each.job) == (run.cluster, compiled)]
        seconds = [planner.predict_run(each, constants).step_s for each in (run, pair)]
        published = run.measured_s / pair.measured_s
        assert published > 1.15
        assert seconds[0] / seconds[1] == pytest.approx(published, rel=0.03)

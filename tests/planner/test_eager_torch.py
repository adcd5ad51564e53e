"""PyTorch without torch.compile: bytes of its kernels."""

from __future__ import annotations

import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants
from unisono.planner.inputs.devices import device_named

LLAMA = planner.load_model("llama3-8b")


def memory_s(model: planner.Transformer, software: str) -> float:
    """Returns the seconds of kernels between matrix products, without their start-up times."""
    job = planner.Workload(
        seq=4096, global_batch=8, micro_batch=1, recompute="none", software=software
    )
    constants = default_constants().changed(kernel_start_s=0.0, straggler=0.0)
    layout = planner.Layout(dp=8, zero=3)
    return planner.predict(model, "h100:8", layout, job, constants=constants).time["memory"]


def test_bytes_of_eager_kernels() -> None:
    """Compares the additional time with a count of bytes per token."""
    constants = default_constants()
    h, keys, inner = 4096, 1024, 14336
    norms = 2 * (6 + 8 + 4 + 8 + 8 + 6) - 8
    rotary = 6 + 8 + 6 - 4
    nbytes = norms * h + rotary * (h + keys) + (4 + 6 - 6) * inner
    device = device_named("h100")
    rate = device.memory_Bps * constants.memory_share / constants.traffic
    # one microbatch of 4,096 tokens, 32 layers, a backward pass of twice the time
    expected = 3 * 32 * 4096 * nbytes / rate
    assert memory_s(LLAMA, "torch-eager") - memory_s(LLAMA, "torch-fsdp") == pytest.approx(expected)


def test_a_gpt_has_the_same_kernels() -> None:
    """Tests a model with LayerNorm, GELU and learned positions: one kernel each in both."""
    gpt = planner.load_model("gpt3-3.6b")
    assert memory_s(gpt, "torch-eager") == pytest.approx(memory_s(gpt, "torch-fsdp"))

"""Memory that the allocator reserves, bytes of and states by software."""

from dataclasses import replace

import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants

CLUSTER = planner.Cluster(device="h100", devices=64)
LAYOUT = planner.Layout(dp=8, tp=8, sequence_parallel=True, zero=1)
JOB = planner.Workload(seq=2048, global_batch=64, micro_batch=1, recompute="full")
MODEL = planner.load_model("gpt3-22b")
STATES = ("weights", "gradients", "optimizer")


def predict(reserved: float, cluster: planner.Cluster = CLUSTER) -> planner.Prediction:
    constants = default_constants().changed(fragmentation=reserved)
    return planner.predict(MODEL, cluster, LAYOUT, JOB, constants=constants)


def test_the_allocator_reserves_more_only_for_activations_and_buffers() -> None:
    live, half = predict(1.0), predict(1.5)
    states = sum(live.memory[name][0] for name in STATES)
    assert states > 0.5 * live.memory_bytes
    expected = states + 1.5 * (live.memory_bytes - states)
    assert half.memory_bytes == pytest.approx(expected, abs=2)
    assert all(half.memory[name] == live.memory[name] for name in STATES)


def test_the_allocator_returns_unused_memory_before_it_fails() -> None:
    """Tests devices with a little more and a little less memory than the live tensors need."""
    live, reserved = predict(1.0).memory_bytes, predict(1.5).memory_bytes
    for share, expected in ((1.001, live * 1.001), (0.999, live), (2.0, reserved)):
        size = int(live * share / 0.95) + 1
        device = replace(CLUSTER.kind, memory_bytes=size)
        found = predict(1.5, planner.Cluster(device=device, devices=64))
        assert found.memory_bytes == pytest.approx(expected, rel=1e-6)
        assert found.fits == (share > 1)
        kinds = sum(found.memory[name][0] for name in found.memory)
        assert kinds == pytest.approx(found.memory_bytes, abs=2)


@pytest.mark.parametrize(
    ("software", "precision", "zero", "nbytes"),
    [
        ("megatron-2021", "bf16", 1, 2 + 4 + 12 / 8),
        ("megatron-2022", "fp16", 1, 2 + 2 + 12 / 8),
        ("transformer-engine", "bf16", 0, 2 + 2 + 12),
        ("megatron-2026", "fp8", 1, 2 + 2 + 12 / 8),
        ("torch-fsdp", "bf16", 3, 16 / 8),
    ],
)
def test_bytes_of_a_parameter(software: str, precision: str, zero: int, nbytes: float) -> None:
    """Compares the states of a parameter on 8 replicas with the sums that each software documents
    (Megatron-LM: docs/source/api-guide/dist_optimizer.md).
    """
    job = replace(JOB, software=software, precision=precision)
    found = planner.predict(MODEL, CLUSTER, replace(LAYOUT, zero=zero), job).memory
    parameters = 8 * sum(found[name][0] for name in STATES) / nbytes
    assert parameters == pytest.approx(MODEL.parameters, rel=1e-3)

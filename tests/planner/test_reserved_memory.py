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


def outside(found: planner.Prediction) -> float:
    return found.memory["context and communicators"][0]


def test_the_allocator_reserves_more_than_live_tensors() -> None:
    live, half = predict(1.0), predict(1.5)
    assert live.live_bytes == half.live_bytes
    assert live.memory_bytes == pytest.approx(live.live_bytes + outside(live), abs=2)
    expected = 1.5 * live.live_bytes + outside(live)
    assert half.memory_bytes == pytest.approx(expected, abs=2)
    kinds = sum(each[0] for name, each in half.memory.items() if name != "fragmentation")
    assert kinds == pytest.approx(live.memory_bytes, abs=2)


def test_each_axis_has_a_communicator() -> None:
    """Tests layouts with the axes dp, tp, and with ep and all devices; one device has none."""
    constants = default_constants()
    layouts = {"dp=8": 2, "tp=8": 2, "dp=2,tp=4": 3, "dp=2,tp=2,pp=2": 4}
    for text, communicators in layouts.items():
        found = planner.predict("gpt3-1.7b", "h100:8", text, JOB)
        extra = outside(found) - 0.5 * 2**30
        assert extra == pytest.approx(communicators * constants.communicator_bytes), text
    one = replace(JOB, global_batch=1)
    assert outside(planner.predict("gpt3-1.7b", "h100:1", "dp=1", one)) == 0.5 * 2**30


def test_the_allocator_returns_unused_memory_before_it_fails() -> None:
    """Tests devices with a little more and a little less memory than needed: live tensors with
    3 %, the context and communicators.
    """
    usual = predict(1.5)
    needed = 1.03 * usual.live_bytes + outside(usual)
    for share, expected in ((1.001, needed * 1.001), (0.999, needed), (2.0, usual.memory_bytes)):
        size = int(needed * share / 0.985) + 1
        device = replace(CLUSTER.kind, memory_bytes=size)
        found = predict(1.5, planner.Cluster(device=device, devices=64))
        assert found.memory_bytes == pytest.approx(expected, rel=1e-6)
        assert found.fits == (share > 1)
        assert found.headroom_bytes == pytest.approx(needed * (share - 1), rel=1e-3)
        assert found.tight == (share == 1.001)
        kinds = sum(found.memory[name][0] for name in found.memory)
        assert kinds == pytest.approx(found.memory_bytes, abs=2)


def test_zero_bubble_pipelines_allocate_what_was_measured() -> None:
    """Compares live tensors with `torch.cuda.max_memory_allocated` of table 4 of arXiv 2401.10241
    (megatron/core/pipeline_parallel/zerobubble/runtime.py of its repository): no constant.
    """
    model = planner.Transformer(layers=30, hidden=4096, heads=32, vocab=50304)
    for text, measured in (("pp=8", 39e9), ("pp=8,schedule=zb1p", 42e9)):
        job = planner.Workload(
            seq=1024,
            global_batch=192,
            micro_batch=3,
            precision="fp16",
            recompute="none",
            software="megatron-2021",
        )
        found = planner.predict(model, "a100:8", text, job)
        assert found.live_bytes == pytest.approx(measured, rel=0.02)


def test_states_of_16_bits() -> None:
    """Tests 8 bytes a parameter (torchtune, NeMo AutoModel), whole and divided by ZeRO."""
    job = replace(JOB, software="torch-fsdp", states="bf16")
    parameters = planner.load_model("gpt3-1.7b").parameters
    for zero, expected in ((0, 8), (1, 2 + 2 + 4 / 64), (3, 8 / 64)):
        layout = planner.Layout(dp=64, zero=zero)
        found = planner.predict("gpt3-1.7b", CLUSTER, layout, job).memory
        whole = sum(found[name][0] for name in STATES)
        assert whole == pytest.approx(expected * parameters, rel=1e-3)
    with pytest.raises(
        ValueError, match="states must be one of mixed, bf16-gradients, bf16, not 'fp16'"
    ):
        replace(JOB, states="fp16")


@pytest.mark.parametrize(
    ("software", "precision", "zero", "nbytes"),
    [
        ("megatron-2021", "bf16", 1, 2 + 4 + 12 / 8),
        ("megatron-2022", "fp16", 1, 2 + 2 + 12 / 8),
        ("transformer-engine", "bf16", 0, 2 + 4 + 12),
        ("transformer-engine", "fp8", 1, 2 + 4 + 12 / 8),
        ("megatron-deepspeed", "bf16", 1, 2 + 2 + 4 + 12 / 8),
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

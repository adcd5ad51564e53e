"""The time in which gradients are added to their sums over the microbatches of a step."""

from __future__ import annotations

import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants

MODEL = planner.load_model("gpt3-1.7b")
MICROBATCHES = 4


def sums_s(software: str, precision: str, *, zero: int = 1) -> float:
    """Returns the seconds of the sums of a step on two devices, in which `MODEL` is whole."""
    job = planner.Workload(
        seq=2048, global_batch=2 * MICROBATCHES, micro_batch=1, recompute="full",
        precision=precision, software=software,
    )  # fmt: skip
    return planner.predict(MODEL, "a100:2", planner.Layout(dp=2, zero=zero), job).time["sums"]


@pytest.mark.parametrize(
    ("software", "precision", "sums", "nbytes"),
    [
        ("megatron-2021", "fp16", MICROBATCHES, 6),  # one read in 16 bits, a sum of 16 bits
        ("megatron-deepspeed", "bf16", MICROBATCHES, 10),  # a sum of 32 bits
        ("torch-eager", "bf16", MICROBATCHES - 1, 10),  # the first gradient is the sum
        ("megatron-2022", "fp16", 0, 0),  # the products of the gradients add
        ("transformer-engine", "bf16", 0, 0),
    ],
)
def test_sums_move_bytes(software: str, precision: str, sums: int, nbytes: int) -> None:
    device = planner.Cluster.parse("a100:2").kind
    rate = device.memory_Bps * default_constants().memory_share
    # The planner counts the parameters of the last stage, which has the output projection.
    expected = sums * nbytes * MODEL.parameters / rate
    assert sums_s(software, precision) == pytest.approx(expected, rel=0.01)


def test_shards_have_no_whole_sums() -> None:
    assert sums_s("torch-eager", "bf16", zero=3) == 0

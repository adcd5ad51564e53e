"""Tensor-parallel exchanges of Megatron-LM, before and since it hides them in backward."""

from __future__ import annotations

import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants

SLOWDOWN = 0.25
EXACT = default_constants().changed(
    straggler=0.0, inner_loss=0.0, kernel_start_s=0.0, memory_share=1e6, overlap_slowdown=SLOWDOWN,
    tile_loss=dict.fromkeys(default_constants().tile_loss, 0.0),
)  # fmt: skip
"""Constants with which each product takes the time of its FLOPs, and other kernels take none."""


def kinds(software: str, recompute: str, **constants: float) -> dict[str, float]:
    """Returns the seconds by kind of a step of GPT-3 on 8 devices."""
    job = planner.Workload(
        seq=2048, global_batch=4, micro_batch=4, precision="fp16", recompute=recompute,
        software=software,
    )  # fmt: skip
    step = planner.predict(
        planner.load_model("gpt3-22b"),
        planner.Cluster.parse("a100:8"),
        planner.Layout(dp=1, tp=8),
        job,
        constants=EXACT.changed(**constants),
    )
    return dict(step.time)


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("full", 3)])
def test_one_pass_of_exchanges_is_hidden(recompute: str, passes: int) -> None:
    old, new = (kinds(name, recompute)["tensor"] for name in ("megatron-2021", "megatron-2022"))
    assert new == pytest.approx(old * (passes - 1 + SLOWDOWN) / passes, rel=1e-6)


def test_weight_gradients_hide_no_more_than_their_time() -> None:
    """Tests slow links: forward products, input gradients and weight gradients take equal times, so
    a third of the products' time hides exchanges.
    """
    old, new = (kinds(name, "none", link_share=0.01) for name in ("megatron-2021", "megatron-2022"))
    hidden = old["matmul"] / 3
    assert old["tensor"] > 4 * hidden
    saved = old["tensor"] - new["tensor"]
    assert saved == pytest.approx(hidden * (1 - SLOWDOWN), rel=1e-6)
    same = [kind for kind in old if kind not in ("tensor", "sums")]
    assert [new[kind] for kind in same] == pytest.approx([old[kind] for kind in same])

"""Optimizer states in the memory of the host: bytes and seconds against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono import planner

MODEL = planner.load_model("llama3-8b")
JOB = planner.Workload(seq=2048, global_batch=8, micro_batch=1, recompute="full")
AWAY = replace(JOB, offload=True)


@pytest.mark.parametrize(
    ("device", "link_Bps", "shared"),
    [("a100", 31.5e9, 8), ("h100", 63e9, 8), ("v100", 15.75e9, 8), ("gb200", 450e9, 2)],
)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_states_move_to_the_host(device: str, link_Bps: float, shared: int, zero: int) -> None:
    precision = "fp16" if device == "v100" else "bf16"
    layout = planner.Layout(dp=8, zero=zero)
    here, away = (
        planner.predict(MODEL, f"{device}:8", layout, replace(job, precision=precision))
        for job in (JOB, AWAY)
    )
    shard = MODEL.parameters / (8 if zero else 1)
    assert here.memory["optimizer"][0] == away.host_bytes == pytest.approx(12 * shard)
    assert away.memory["optimizer"] == (0,) and here.host_bytes == 0
    assert away.memory["weights"] == here.memory["weights"]
    # Gradients and weights of 2 bytes over the link, and 10 billion updates in 2.6 s a host. The
    # time of the optimizer counts the layers and the output, not the embedding.
    updated = (MODEL.parameters - MODEL.embedding_parameters) / (8 if zero else 1)
    expected_s = updated * (4 / (0.8 * link_Bps) + shared * 0.26e-9)
    assert away.time["optimizer"] == pytest.approx(expected_s, rel=1e-3)
    assert away.step_s > here.step_s


def test_a_search_leaves_the_weights_on_the_devices() -> None:
    job = planner.Workload(seq=2048, global_batch=16)
    with pytest.raises(ValueError, match=r"nothing fits: .*what fits: offload \(.* in each host\)"):
        planner.search("gpt3-22b", "a100:4", job)
    found = planner.search("gpt3-22b", "a100:4", replace(job, offload=True), keep=20)
    assert all(each.layout.zero < 3 and each.prediction.fits for each in found)
    with pytest.raises(ValueError, match="so zero = 1 or 2 works, not 3"):
        planner.predict(MODEL, "a100:8", "dp=8,zero=3", AWAY)
    with pytest.raises(ValueError, match=r"the link of TPU-v5p to its host is not known"):
        planner.predict(MODEL, "tpu-v5p:8", "dp=8,zero=1", AWAY)

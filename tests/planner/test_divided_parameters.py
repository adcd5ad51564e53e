"""What one device holds: the heads, norms and routers that tensor parallelism replicates."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from unisono import planner
from unisono.planner.inputs.layout_check import check_layout

MODEL = planner.load_model("qwen3-235b-a22b")  # 4 key-value heads
JOB = planner.Workload(seq=4096, global_batch=256, micro_batch=1, recompute="full")


def whole_states(model: planner.Transformer, layout: str) -> float:
    """Returns the bytes of weights of all devices of all stages, with each part held once."""
    step = planner.predict(model, "h100:64", layout, JOB)
    return sum(step.memory["weights"]) * 64 / step.layout.pp / 2


@pytest.mark.parametrize(("tp", "copies"), [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4)])
def test_memory_of_replicated_parts(tp: int, copies: int) -> None:
    """Counts the parameters of all devices one matrix at a time."""
    model = replace(MODEL, layers=2, tied=False)
    layout = f"dp={64 // tp},tp={tp},ep=64"
    h, layers = model.hidden, model.layers
    attention = h * (64 * 128 * 2 + 2 * 4 * 128 * copies)  # queries, output, keys and values
    once = 2 * h + 2 * 128 + h * model.experts  # norms and the router, on every rank
    dense = layers * (attention + tp * once) + 2 * model.vocab * h
    routed = layers * model.experts * 3 * h * model.expert_ffn
    found = whole_states(model, layout)
    assert found == pytest.approx(64 / tp * dense + routed, rel=1e-4)


def test_search_and_check_agree() -> None:
    """Tests that a search proposes exactly the numbers of ranks that `check_layout` accepts."""
    model = planner.Transformer(
        layers=4, hidden=768, heads=48, kv_heads=8, ffn=2048, vocab=1000, gated=True
    )
    cluster = planner.Cluster(device="h100", devices=48, per_host=48)
    job = planner.Workload(seq=1536, global_batch=48)
    proposed = {each.layout.tp for each in planner.search(model, cluster, job, keep=100_000)}
    accepted = set()
    for tp in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48):
        try:
            check_layout(model, cluster, planner.Layout(dp=48 // tp, tp=tp), job)
        except ValueError:
            continue
        accepted.add(tp)
    assert proposed == accepted == {1, 2, 4, 8, 16, 24, 48}


@pytest.mark.parametrize(
    ("tp", "text"),
    [
        (12, "tp must divide the key-value heads or be a multiple: 12 does not fit 8; 8 does"),
        (5, "tp must divide the heads: 5 does not divide 48; 4 does"),
    ],
)
def test_refused_numbers_of_ranks(tp: int, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        planner.require_heads(48, 8, tp)

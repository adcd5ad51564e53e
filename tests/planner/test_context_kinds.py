"""Kinds of context parallelism: their exchanges against closed forms, and what hides them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants
from unisono.planner.inputs.workload import CONTEXT_KINDS
from unisono.planner.step_times.step_time import StepModel

MODEL = planner.load_model("llama3-8b")
JOB = planner.Workload(seq=32768, global_batch=1, micro_batch=1, recompute="none")
CLUSTER = planner.Cluster(device="h100", devices=8)
LAYOUT = planner.Layout(cp=8, zero=1)


def context_s(kind: str, rate: float) -> float:
    cluster = replace(CLUSTER, link_Bps=rate)
    return planner.predict(MODEL, cluster, LAYOUT, replace(JOB, context=kind)).time["context"]


@pytest.mark.parametrize("kind", CONTEXT_KINDS)
def test_bytes_of_each_kind(kind: str) -> None:
    """Tests the bytes on links so slow that nothing hides them, forward and backward: a rank
    receives 7 / 8 of all keys and values; or sends 7 / 8 of its queries, keys, values and outputs.
    """
    rate, tokens = 1e8, 32768 / 8
    keys = 2 * MODEL.kv_heads * MODEL.head_dim
    heads = 2 * MODEL.heads * MODEL.head_dim
    values = {"ulysses": tokens * (heads + keys)}.get(kind, 32768 * keys)
    share = default_constants().link_share
    sent_s = 2 * MODEL.layers * 2 * values * 7 / 8 / (rate * share)
    difference_s = context_s(kind, rate) - context_s(kind, 2 * rate)
    assert difference_s == pytest.approx(sent_s / 2, rel=1e-6)


def test_only_a_ring_is_hidden() -> None:
    steps = {
        kind: planner.predict(MODEL, CLUSTER, LAYOUT, replace(JOB, context=kind))
        for kind in CONTEXT_KINDS
    }
    times = {kind: step.time["context"] for kind, step in steps.items()}
    assert times["ring"] < 0.5 * min(times["ulysses"], times["allgather"])
    memory = {kind: step.memory["exchange buffers"][0] for kind, step in steps.items()}
    keys = 2 * 32768 * 2 * MODEL.kv_heads * MODEL.head_dim
    assert memory == {"ring": 0, "ulysses": 0, "allgather": keys}


def test_heads_limit_ulysses() -> None:
    job = planner.Workload(seq=65536, global_batch=1, micro_batch=1, context="ulysses")
    with pytest.raises(ValueError, match="cp x tp with context = ulysses must divide the heads"):
        planner.predict(MODEL, "h100:64", "cp=64,zero=3", job)
    for each in planner.search(MODEL, "h100:64", job, keep=100, folded=False):
        assert each.layout.cp == 1 or MODEL.heads % (each.layout.cp * each.layout.tp) == 0
        again = planner.predict(MODEL, "h100:64", each.layout, each.job)
        assert again.step_s == pytest.approx(each.prediction.step_s)
    with pytest.raises(ValueError, match="context must be one of ring, ulysses, allgather"):
        replace(JOB, context="star")


def test_steps_of_a_ring_add_their_results() -> None:
    """Tests the bytes of the sums, 10 for each value and step, and that a ring's attention is
    slower than that over gathered keys, as its kernels are shorter.
    """
    model = planner.load_model("llama3-8b")
    cluster, layout = planner.Cluster.parse("h100:8"), planner.Layout(dp=2, cp=4)
    found = {}
    for kind in ("ring", "allgather"):
        job = planner.Workload(seq=8192, global_batch=8, micro_batch=1, context=kind)
        times = StepModel(model, cluster, job, default_constants())
        shape = times.shape(layout, 1, experts=False)
        found[kind] = {each.name: each for each in times.layers.operators(shape)}
    assert found["ring"]["ring sums"].nbytes == 4 * 10 * 2048 * 4096
    assert "ring sums" not in found["allgather"]
    ratio = found["ring"]["attention"].forward_s / found["allgather"]["attention"].forward_s
    assert ratio == pytest.approx((1 + 4 * 400 / 8192) / (1 + 400 / 8192))

"""Values that inputs refuse, other spellings that they accept, and texts in place of objects."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unisono import planner
from unisono.planner import recommendation
from unisono.planner.inputs.training_flops import step_flops, training_days

GPT: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 100}
EXPERTS: dict[str, Any] = {**GPT, "experts": 4, "top_k": 2, "expert_ffn": 64}
JOB = planner.Workload(seq=2048, global_batch=64)
A100 = planner.Cluster(device="a100", devices=8)
MODEL = planner.load_model("gpt3-1.7b")


def gpt(**changes: Any) -> planner.Transformer:
    return planner.Transformer(**{**GPT, **changes})


def cluster(**changes: Any) -> planner.Cluster:
    return planner.Cluster(**{"device": "a100", "devices": 16, **changes})


def predicted(**changes: Any) -> object:
    values: dict[str, Any] = {"model": MODEL, "cluster": A100, "job": JOB}
    values |= {"layout": planner.Layout(dp=8)} | changes
    return planner.predict(**values)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: cluster(devices=1.5), "devices must be a whole number, not 1.5"),
    (lambda: cluster(devices="8"), "devices must be a whole number, not '8'; 8 is"),
    (lambda: cluster(devices=True), "devices must be a whole number, not True"),
    (lambda: cluster(per_host=2.0), "per_host must be a whole number, not 2.0; 2 is"),
    (lambda: cluster(oversubscription=0.1), "oversubscription must be 1 or more, not 0.1"),
    (lambda: cluster(oversubscription="2"), "oversubscription must be positive, not '2'"),
    (lambda: cluster(network_Bps=0), "network_Bps must be positive, not 0"),
    (lambda: cluster(device=8), "device must be a name or a Device, not 8"),
    (lambda: cluster(topology=4), "topology must be a Topology or a text such as 'torus:4x4'"),
    (lambda: cluster(topology="torus:4x2"), "the topology has 8 ranks, but the cluster has 16"),
    (lambda: gpt(layers=2.5), "layers must be a whole number, not 2.5"),
    (lambda: gpt(layers="2"), "layers must be a whole number, not '2'; 2 is"),
    (lambda: gpt(gated="no"), "gated must be True or False, not 'no'"),
    (lambda: gpt(hidden=100, heads=3), "heads must divide hidden: 3 does not divide 100; 2 does"),
    (lambda: gpt(shared_experts=3), "shared_experts = 3 needs a model with experts"),
    (lambda: gpt(top_k=2), "top_k = 2 needs a model with experts"),
    (lambda: gpt(rope_dim=8), "rope_dim = 8 needs a model with latent attention (kv_rank)"),
    (lambda: gpt(kv_rank=8, kv_heads=2), "kv_heads must be 4, not 2"),
    (
        lambda: planner.Cluster.from_document({"device": {"like": 5}, "devices": 8}),
        "a device's name is a text, not 5",
    ),
    (lambda: gpt(layer_vectors=-1), "layer_vectors must be at least 0, not -1"),
    (
        lambda: planner.Transformer(**EXPERTS, dense_layers=5),
        "dense_layers must be at most the 2 layers, not 5",
    ),
    (lambda: planner.Layout(dp=64.0), "dp must be a whole number, not 64.0; 64 is"),  # type: ignore[arg-type]
    (lambda: planner.Layout(zero=True), "zero must be a whole number, not True"),
    (lambda: planner.Layout(zero=-1), "zero must be 0, 1, 2 or 3, not -1"),
    (lambda: planner.Layout(sequence_parallel=2), "sequence_parallel must be True or False"),  # type: ignore[arg-type]
    (lambda: planner.Layout.parse("sp=1"), "a layout has no sp; sequence_parallel is its name"),
    (lambda: planner.Layout.parse("dp=2,dp=4"), "the layout states dp twice"),
    (lambda: planner.Layout.parse("sequence_parallel=5"), "sequence_parallel must be True or"),
    (lambda: planner.Layout.from_document({"sp": 1}), "sequence_parallel is its name"),
    (lambda: planner.Workload(seq=2048.0, global_batch=8), "not 2048.0; 2048 is"),  # type: ignore[arg-type]
    (lambda: planner.Workload(seq="2048", global_batch=8), "not '2048'; 2048 is"),  # type: ignore[arg-type]
    (lambda: planner.Workload(seq=1, global_batch=True), "global_batch must be a whole number"),
    (lambda: planner.Workload(seq=1, global_batch=4, micro_batch=0), "micro_batch must be at"),
    (
        lambda: predicted(layout=planner.Layout(dp=2, tp=4, tensor="2d")),
        "tensor = 2d is not predicted, because no published run uses it; tensor = 1d works",
    ),
    (
        lambda: predicted(layout=planner.Layout(dp=8, dp_replicate=8)),
        "dp_replicate = 8 makes replicas of the shards of ZeRO, and zero = 0 has none",
    ),
    (
        lambda: predicted(
            model=planner.Transformer(**EXPERTS),
            layout=planner.Layout(dp=8, dp_replicate=4, ep=4, zero=1),
        ),
        "ep must divide dp / dp_replicate x cp x tp: 4 does not divide 2; 2 does",
    ),
    (
        lambda: step_flops(gpt(), seq=1, batch=1, recompute="Full"),
        "recompute must be one of none, selective, full, not 'Full'",
    ),
    (
        lambda: training_days(tokens=1, parameters=1, devices=1, rate=1, recompute="half"),
        "recompute must be one of none, selective, full, not 'half'",
    ),
    (
        lambda: training_days(tokens=1, parameters=1, devices=0, rate=1),
        "devices must be positive, not 0",
    ),
    (lambda: planner.search(MODEL, A100, JOB, longest_s=-1), "longest_s must be positive, not -1"),
    (lambda: planner.search(MODEL, A100, JOB, keep=0), "keep must be at least 1, not 0"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused_values(number: int) -> None:
    make, text = REFUSED[number]
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        make()
    assert "\n" not in str(caught.value)


WRONG_KINDS: list[tuple[Callable[[], object], str]] = [
    (lambda: planner.Layout(sp=True), "a layout has no sp; sequence_parallel is its name"),  # type: ignore[call-arg]
    (lambda: planner.Layout(tensors="2d"), "a layout has no tensors; tensor is near"),  # type: ignore[call-arg]
    (lambda: predicted(model=7), "model must be a Transformer or a name such as"),
    (lambda: predicted(cluster=8), "cluster must be a Cluster or a text such as 'h100:8', not 8"),
    (lambda: predicted(layout=8), "layout must be a Layout or a text such as 'dp=2,tp=4', not 8"),
    (lambda: predicted(job=None), "job must be a Workload, such as"),
    (lambda: planner.search(MODEL, A100, JOB, executor=4), "executor must be an object with"),  # type: ignore[call-overload]
    (lambda: planner.pareto_front(MODEL, A100, JOB, executor=4), "executor must be an object with"),  # type: ignore[arg-type]
    (lambda: planner.scaling_curve(MODEL, A100, "x"), "job must be a Workload, such as"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("number", range(len(WRONG_KINDS)))
def test_wrong_kinds_of_inputs(number: int) -> None:
    make, text = WRONG_KINDS[number]
    with pytest.raises(TypeError, match=re.escape(text)) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_whole_numbers() -> None:
    two: Any = np.int64(2)
    assert planner.Layout(dp=two) == planner.Layout(dp=2)
    assert type(planner.Layout(dp=two).dp) is int  # so that `save` can write it
    assert gpt(layers=two) == gpt(layers=2)
    assert cluster(devices=np.int32(16)) == cluster(devices=16)
    assert planner.Workload(seq=two, global_batch=two).tokens == 4
    divided: Any = np.bool_(True)
    assert planner.Layout(tp=2, sequence_parallel=divided).sequence_parallel is True


def test_texts_of_the_command_line_are_inputs() -> None:
    layout, texts = planner.Layout(dp=2, tp=4, zero=1), ("gpt3-1.7b", "a100:8", "dp=2,tp=4,zero=1")
    assert predicted(layout=layout) == planner.predict(*texts, JOB)
    job = planner.Workload(seq=2048, global_batch=64, micro_batch=4, recompute="full")
    best = planner.search(MODEL, A100, job)[0]
    assert planner.search(*texts[:2], job)[0] == best
    curve = planner.scaling_curve(*texts[:2], job)
    assert curve == planner.scaling_curve(MODEL, A100, job)
    front = planner.pareto_front(*texts[:2], job)
    assert front == planner.pareto_front(MODEL, A100, job)
    assert planner.sensitivity(*texts, job) == planner.sensitivity(MODEL, A100, layout, job)
    clicks = planner.Workload(seq=1, global_batch=65536)
    clicked = recommendation.load_dlrm("dlrm-mlperf")
    stated = recommendation.predict(clicked, A100, planner.Layout(dp=8), clicks)
    assert recommendation.predict("dlrm-mlperf", "a100:8", "dp=8", clicks) == stated


def test_a_network_by_its_text() -> None:
    from unisono import topology

    stated = cluster(topology=topology.parse("torus:4x4"))
    by_text = cluster(topology="torus:4x4")
    steps = [
        planner.predict(MODEL, each, planner.Layout(dp=4, tp=4), JOB).step_s
        for each in (stated, by_text)
    ]
    assert steps[0] == steps[1]


def test_biases_of_layers_with_experts() -> None:
    """Tests that the dense layers of a GPT with experts have the biases of a dense GPT."""
    both = planner.Transformer(**EXPERTS, dense_layers=1)
    dense = gpt().dense_layer_parameters
    alone = planner.Transformer(**{**EXPERTS, "layers": 1})
    assert both.parameters == dense + alone.parameters

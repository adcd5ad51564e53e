"""Predictions of 2D, 2.5D and 3D tensor parallelism: work, start-up times, memory and search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unisono import planner
from unisono.planner import TENSOR_KINDS, Cluster, Layout, Transformer, Workload
from unisono.planner.inputs.grid_products import layer_products
from unisono.planner.memory.grid_activations import gathered_bytes
from unisono.planner.run_model import RunModel

RATE = 1e9
MODEL = Transformer(layers=4, hidden=1536, heads=24, vocab=6144)
GRIDS = [("2d", 4), ("2d", 9), ("2.5d", 8), ("2.5d", 18), ("3d", 8), ("3d", 27)]
CONSTANTS = planner.default_constants().changed(
    link_share=1.0, link_start_s=0.0, link_rank_s=0.0, straggler=0.0
)
JOB = Workload(seq=512, global_batch=72, micro_batch=36, recompute="none")


def cluster(devices: int, **changes: Any) -> Cluster:
    device = replace(planner.device_named("a100"), name="test", link_Bps=RATE)
    return Cluster(device=device, devices=devices, per_host=devices, **changes)


def predict(kind: str, tp: int, **options: Any) -> planner.Prediction:
    layout = options.pop("layout", Layout(tp=tp, tensor=kind))
    constants, job = options.pop("constants", CONSTANTS), options.pop("job", JOB)
    found = cluster(layout.devices, **options)
    return planner.predict(MODEL, found, layout, job, constants=constants)


@pytest.mark.parametrize(("kind", "tp"), GRIDS)
def test_ranks_share_the_work_of_a_layer(kind: str, tp: int) -> None:
    run = RunModel(MODEL, cluster(tp), JOB, CONSTANTS)
    shape = run.times.shape(Layout(tp=tp, tensor=kind), 36, experts=False)
    flops = sum(each.flops for each in run.times.layers.operators(shape) if each.kind == "matmul")
    weights, _, _ = planner.forward_flops(MODEL, seq=512, batch=36)
    assert flops * tp * MODEL.layers == pytest.approx(weights)


@pytest.mark.parametrize(
    ("kind", "tp", "starts"),
    [
        # Forward: q broadcasts of inputs and of weights; backward: twice as many.
        ("2d", 4, 4 * 3 * 2 * 2),
        ("2d", 9, 4 * 3 * 2 * 3),
        ("2.5d", 8, 4 * 3 * 2 * 2),
        ("3d", 8, 4 * 2 * 3),  # two gathers and a scatter, forward and backward
    ],
)
def test_start_up_times(kind: str, tp: int, starts: int) -> None:
    """Tests links of infinite rate, on which exchanges take their start-up times only."""
    constants = CONSTANTS.changed(link_share=1e9, link_start_s=1.0)
    found = predict(kind, tp, constants=constants)
    norms = 2 * 2 * 2  # two norms of two sums, forward and backward
    expected = 2 * MODEL.layers * (starts + norms)
    assert found.time["tensor"] == pytest.approx(expected, rel=1e-6)


def test_recomputation_repeats_the_exchanges_of_forward() -> None:
    for kind, tp, passes in (("2d", 4, 4 / 3), ("3d", 8, 3 / 2)):
        none, full = (
            predict(kind, tp, job=replace(JOB, recompute=each)).time["tensor"]
            for each in ("none", "full")
        )
        assert full / none == pytest.approx(passes, rel=1e-3)  # sums of norms: 3/2


def test_planes_sum_the_gradients_of_their_weights() -> None:
    """Tests 2 planes of 2 x 2 ranks: an all_reduce among 2, or among all ranks that see other
    samples. The last layer's share is exposed, and the other shares slow compute down.
    """
    constants = CONSTANTS.changed(overlap_slowdown=1.0, optimizer_bytes=0.0)
    untied, job = replace(MODEL, tied=False), replace(JOB, micro_batch=12)
    weights = 4 * MODEL.dense_layer_parameters / 4 + MODEL.vocab * MODEL.hidden / 4
    for dp in (1, 3):
        layout = Layout(dp=dp, tp=8, tensor="2.5d")
        found = planner.predict(untied, cluster(8 * dp), layout, job, constants=constants)
        ranks = 2 * dp
        expected = 2 * (ranks - 1) / ranks * 2 * weights / RATE
        assert found.time["gradients"] == pytest.approx(expected)
    sharded = Layout(dp=3, tp=8, tensor="2.5d", zero=1)
    found = planner.predict(untied, cluster(24), sharded, job, constants=constants)
    expected = (2 * 2 / 3 * 2 * weights + 2 / 2 * 2 * weights / 3) / RATE
    assert found.time["gradients"] == pytest.approx(expected)


def test_memory_of_a_grid() -> None:
    """Tests weights over each plane or the cube, and activations over all ranks."""
    for kind, tp in GRIDS:
        layout = Layout(tp=tp, tensor=kind)
        found = predict(kind, tp)
        parts = layout.tensor_grid.row ** (3 if kind == "3d" else 2)
        assert found.memory["weights"][0] == pytest.approx(2 * _divided_parameters() / parts)
        one = planner.layer_activation_bytes(
            MODEL, seq=512, batch=36, software="transformer-engine"
        )
        copies = gathered_bytes(MODEL, kind, tp, 512 * 36)
        assert found.memory["activations"][0] == pytest.approx(4 * (one / tp + copies))
        assert (copies > 0) is (kind == "3d")


def _divided_parameters() -> int:
    return 4 * MODEL.dense_layer_parameters + MODEL.embedding_parameters


def test_a_cube_keeps_what_it_gathers() -> None:
    tokens, h = 1000, MODEL.hidden
    inputs = h + h + h + 4 * h
    weights = h * (3 * h + h + 4 * h + 4 * h)
    assert sum(each.inputs * each.outputs for each in layer_products(MODEL)) == weights
    gathered = 2 * (tokens * inputs + weights) / 4 - 2 * tokens * inputs / 8
    assert gathered_bytes(MODEL, "3d", 8, tokens) == gathered


def test_simulated_exchanges_are_those_of_the_closed_form() -> None:
    from unisono import topology

    network = topology.parse(f"nvswitch:8,bandwidth={RATE * 8}bit")
    same = CONSTANTS.changed(network_share=1.0)
    for kind in ("2.5d", "3d"):
        simulated = predict(kind, 8, topology=network, constants=same).time["tensor"]
        assert simulated == pytest.approx(predict(kind, 8).time["tensor"], rel=0.05)


def test_distant_ranks_use_the_network() -> None:
    """Tests that the columns of a plane, whose ranks are on different hosts, take the rate of the
    network, and the rows the rate of links.
    """
    layout = Layout(tp=16, tensor="2d")
    slow, fast = (
        planner.predict(
            MODEL, replace(cluster(16), per_host=4, network_Bps=rate), layout, JOB
        ).time["tensor"]
        for rate in (1e8, 1e12)
    )
    assert slow > 2 * fast


@pytest.mark.parametrize(
    ("changes", "layout", "job", "text"),
    [
        (
            {"experts": 8, "top_k": 2, "expert_ffn": 64},
            {},
            {},
            "the model has experts; tensor = 1d",
        ),
        ({"kv_rank": 8}, {}, {}, "the model has latent attention; tensor = 1d works"),
        (
            {"heads": 9, "kv_heads": 9, "head_dim": 64},
            {},
            {},
            "the side of the grid of tensor = 2d must divide the",
        ),
        ({"kv_heads": 3}, {}, {}, "must divide the heads of keys: 2 does not divide 3; 1 does"),
        ({}, {}, {"micro_batch": 3}, "into 2 parts: micro_batch = 3 is no multiple; 4 is"),
        ({}, {}, {"micro_batch": None, "global_batch": 9}, "global_batch must be a multiple of"),
    ],
)
def test_what_is_not_predicted_is_refused(
    changes: dict[str, Any], layout: dict[str, Any], job: dict[str, Any], text: str
) -> None:
    model = replace(MODEL, **changes)
    plane = Layout(tp=4, tensor="2d", **layout)
    with pytest.raises(ValueError, match=text):
        planner.predict(model, cluster(plane.devices), plane, replace(JOB, **job))


@pytest.mark.parametrize("schedule", ["zb1p", "zbv", "dualpipev"])
def test_schedules_that_split_the_backward_pass_have_less_bubble(schedule: str) -> None:
    machine, job = cluster(8), replace(JOB, global_batch=64, micro_batch=2)
    times = {
        name: planner.predict(
            MODEL, machine, Layout(tp=4, pp=2, vpp=None, tensor="2d", schedule=name), job
        ).time
        for name in ("gpipe", schedule)
    }
    assert times[schedule]["bubble"] < times["gpipe"]["bubble"]


def test_a_search_compares_all_kinds() -> None:
    """Tests a search on slow links against the predictions of every layout it may choose."""
    job = Workload(seq=4096, global_batch=32, micro_batch=8, recompute="none")
    machine = cluster(8, link_Bps=2e9)
    found = planner.search(MODEL, machine, job, tensors=TENSOR_KINDS, keep=1000)
    kinds = {each.layout.tensor for each in found}
    assert kinds == set(TENSOR_KINDS)
    best: dict[str, float] = {}
    for each in found:
        known = planner.predict(MODEL, machine, each.layout, each.job).step_s
        assert each.prediction.step_s == pytest.approx(known)
        best.setdefault(each.layout.tensor, known)
    only = planner.search(MODEL, machine, job, keep=1)
    assert only[0].prediction.step_s == best["1d"]
    first = planner.search(MODEL, machine, job, tensors=TENSOR_KINDS, keep=1)
    assert first[0].prediction.step_s == min(best.values())
    with pytest.raises(ValueError, match=r"tensors must be of 1d, 2d, 2.5d, 3d, not '4d'"):
        planner.search(MODEL, machine, job, tensors=("4d",))


def test_the_time_of_a_layer_depends_on_the_kind() -> None:
    """Tests the cached times that the bounds of a search use."""
    run = RunModel(MODEL, cluster(8), JOB, CONSTANTS)
    times = {
        kind: run.times.layer_s(Layout(tp=8, tensor=kind), 36, "none", experts=False)
        for kind in ("1d", "2.5d", "3d")
    }
    assert len(set(times.values())) == 3


def test_sides_of_a_cube_on_hosts_of_two() -> None:
    """Tests a cube of 2 x 2 x 2 ranks, of which only neighbours in a row share a host.

    A first product gathers its input along the columns, and a last product scatters its output
    along them; both gather weights along the depth. All these use the network. The other
    exchanges take no time.
    """
    rate, tokens, h = 1e8, 512 * 36, MODEL.hidden
    constants = CONSTANTS.changed(network_share=1.0, network_start_s=0.0, link_share=1e9)
    machine = replace(cluster(8), per_host=2, network_Bps=rate)
    found = planner.predict(MODEL, machine, Layout(tp=8, tensor="3d"), JOB, constants=constants)
    products = ((h, 3 * h, h), (h, h, h), (h, 4 * h, h), (4 * h, h, h))
    elements = sum(tokens * side + inputs * outputs for inputs, outputs, side in products)
    one_s = (1 / 2) * 2 * elements / 4 / rate  # half of 2 bytes for each element of a part
    expected = 2 * MODEL.layers * 2 * one_s  # two microbatches, forward and backward
    assert found.time["tensor"] == pytest.approx(expected, rel=1e-6)


def test_smaller_layouts_of_a_grid() -> None:
    layout, job = Layout(dp=2, tp=4, tensor="2d"), replace(JOB, global_batch=144, micro_batch=72)
    whole = planner.predict(MODEL, cluster(8), layout, job).memory_bytes
    small = replace(planner.device_named("a100"), memory_bytes=int(whole * 0.7))
    tight = replace(cluster(8), device=small)
    change = planner.smallest_change(MODEL, tight, layout, job)
    assert change is not None and change.prediction.layout.tensor == "2d"
    assert change.text and "sequence_parallel" not in change.text

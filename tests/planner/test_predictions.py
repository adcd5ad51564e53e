"""Predictions: their parts add up to the total, and they change in the right direction."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants
from unisono.planner.inputs.training_flops import step_flops
from unisono.planner.step_times.time_tree import TimeNode

MODEL = planner.load_model("gpt3-22b")
CLUSTER = planner.Cluster.parse("a100:64")
LAYOUT = planner.Layout(dp=4, tp=4, pp=4, sequence_parallel=True, zero=1)
JOB = planner.Workload(seq=2048, global_batch=64, micro_batch=1, recompute="selective")


def step_s(**changes: object) -> float:
    """Returns the step time after changes to fields of layout, job or cluster."""
    layout, job, cluster = LAYOUT, JOB, CLUSTER
    for name, value in changes.items():
        if hasattr(layout, name):
            layout = replace(layout, **{name: value})  # type: ignore[arg-type]
        elif hasattr(job, name):
            job = replace(job, **{name: value})  # type: ignore[arg-type]
        else:
            cluster = replace(cluster, **{name: value})  # type: ignore[arg-type]
    return planner.predict(MODEL, cluster, layout, job).step_s


def test_parts_add_up() -> None:
    found = planner.predict(MODEL, CLUSTER, LAYOUT, JOB)
    assert sum(found.time.values()) == pytest.approx(found.step_s)
    assert all(seconds >= 0 for seconds in found.time.values())
    by_stage = [sum(found.memory[kind][stage] for kind in found.memory) for stage in range(4)]
    assert max(by_stage) == pytest.approx(found.memory_bytes, abs=1)
    assert found.tokens_per_s == pytest.approx(64 * 2048 / found.step_s)
    flops = step_flops(MODEL, seq=2048, batch=64)
    assert found.mfu == pytest.approx(flops / (found.step_s * 64 * 312e12))
    assert found.low_s < found.step_s < found.high_s


def test_explanation_is_a_tree_of_the_same_time() -> None:
    tree = planner.predict(MODEL, CLUSTER, LAYOUT, JOB).explain()

    def leaves(node: TimeNode) -> float:
        return sum(map(leaves, node.children)) if node.children else node.seconds

    assert leaves(tree) == pytest.approx(tree.seconds)
    text = str(tree)
    for part in ("matrix products", "feed-forward in", "FLOPs", "pipeline bubble", "(4 - 1)"):
        assert part in text


@pytest.mark.parametrize(
    ("slower", "than"),
    [
        ({"recompute": "full"}, {"recompute": "none"}),
        ({"global_batch": 128}, {"global_batch": 64}),
        ({"network_Bps": 1e9}, {"network_Bps": 25e9}),
        ({"link_Bps": 30e9}, {"link_Bps": 300e9}),
        ({"oversubscription": 8.0}, {"oversubscription": 1.0}),
        ({"schedule": "1f1b"}, {"schedule": "zb1p"}),
        ({"vpp": 1}, {"vpp": 3}),
        ({"zero": 0}, {"zero": 1}),
    ],
)
def test_what_makes_a_step_slower(slower: dict[str, object], than: dict[str, object]) -> None:
    assert step_s(**slower) > step_s(**than)


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4, 8]),
    micro=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    zero=st.sampled_from([0, 1]),
    precision=st.sampled_from(["bf16", "fp16"]),
)
def test_every_layout_obeys_the_limits(
    tp: int, pp: int, micro: int, recompute: str, zero: int, precision: str
) -> None:
    """Tests that no step takes less time than its FLOPs at the peak rate, and that a step with
    recomputation never needs more memory than without.
    """
    layout = planner.Layout(dp=64 // (tp * pp), tp=tp, pp=pp, zero=zero)
    job = planner.Workload(
        seq=2048, global_batch=128, micro_batch=micro, recompute=recompute, precision=precision
    )
    found = planner.predict(MODEL, CLUSTER, layout, job)
    flops = step_flops(MODEL, seq=2048, batch=128, recompute=recompute)
    causal = flops - 0.5 * (flops - step_flops(MODEL, seq=1, batch=128 * 2048))
    assert found.step_s > causal / (64 * 312e12)
    kept = planner.predict(MODEL, CLUSTER, layout, replace(job, recompute="none"))
    assert found.memory_bytes <= kept.memory_bytes * 1.0001


def test_open_choices_take_the_fastest_that_fits() -> None:
    open_job = planner.Workload(seq=2048, global_batch=64)
    open_layout = replace(LAYOUT, vpp=None)
    found = planner.predict(MODEL, CLUSTER, open_layout, open_job)
    assert found.fits
    every = [
        planner.predict(
            MODEL,
            CLUSTER,
            replace(LAYOUT, vpp=vpp),
            replace(open_job, micro_batch=micro, recompute=recompute),
        )
        for vpp in (1, 2, 3, 4, 6, 12)
        for micro in (1, 2, 4, 8, 16)
        for recompute in ("none", "selective", "full")
        if vpp == 1 or (16 // micro) % 4 == 0
    ]
    assert found.step_s == pytest.approx(min(each.step_s for each in every if each.fits))


def test_smallest_change_that_makes_it_fit() -> None:
    job = planner.Workload(seq=2048, global_batch=64, micro_batch=8, recompute="none")
    layout = planner.Layout(dp=8, tp=8)
    assert not planner.predict(MODEL, CLUSTER, layout, job).fits
    change = planner.smallest_change(MODEL, CLUSTER, layout, job)
    assert change is not None and change.prediction.fits
    assert change.text and "," not in change.text
    fitting = planner.smallest_change(MODEL, CLUSTER, LAYOUT, JOB)
    assert fitting is not None and fitting.text == ""
    huge = planner.load_model("gpt3-1t")
    small = planner.Cluster.parse("a100:8")
    assert planner.smallest_change(huge, small, planner.Layout(tp=8), replace(job)) is None


def test_experts() -> None:
    """Tests that experts add exchanges to a step, and that a step takes more time if each token is
    routed to more experts.
    """
    cluster = planner.Cluster.parse("h100:16")
    layout = planner.Layout(dp=16, ep=16, zero=1)
    job = planner.Workload(seq=4096, global_batch=64, micro_batch=1, precision="fp8")
    model = planner.load_model("qwen3-30b-a3b")
    found = planner.predict(model, cluster, layout, job)
    assert found.time["expert"] > 0
    more = planner.predict(replace(model, top_k=16), cluster, layout, job)
    assert more.step_s > found.step_s
    deepseek = planner.predict(
        planner.load_model("deepseek-v3"),
        planner.Cluster.parse("h100:1024"),
        planner.Layout(dp=64, pp=16, ep=64, zero=1, vpp=None),
        planner.Workload(seq=4096, global_batch=15360, precision="fp8"),
    )
    assert 0 < deepseek.mfu < 1


def test_precision_that_a_device_lacks() -> None:
    with pytest.raises(ValueError, match="A100-SXM4-80GB has no fp8"):
        planner.predict(MODEL, CLUSTER, LAYOUT, replace(JOB, precision="fp8"))


@pytest.mark.parametrize("device", [device.name for device in planner.catalogue()])
def test_every_device_predicts(device: str) -> None:
    cluster = planner.Cluster(device=device, devices=16, per_host=8)
    precision = "fp16" if "fp16" in cluster.kind.peak else "bf16"
    found = planner.predict(
        planner.load_model("gpt3-1.7b"),
        cluster,
        planner.Layout(dp=16, zero=1),
        planner.Workload(seq=2048, global_batch=64, precision=precision, micro_batch=1),
    )
    assert 0.02 < found.mfu < 0.9


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8", "fp4"])
def test_own_devices_of_an_unknown_architecture(precision: str) -> None:
    [h100] = [each for each in planner.catalogue() if each.name == "H100-SXM5-80GB"]
    peak = {"fp32": 1e14, "bf16": 1e15, "fp8": 2e15, "fp4": 4e15}
    own = replace(h100, name="own", architecture="unknown", peak=peak)
    cluster = planner.Cluster(device=own, devices=8, per_host=8)
    job = planner.Workload(seq=2048, global_batch=64, precision=precision, micro_batch=1)
    assert 0.01 < planner.predict(MODEL, cluster, planner.Layout(dp=8, zero=3), job).mfu < 0.9


@pytest.mark.parametrize(
    ("schedule", "vpp", "recompute", "share"),
    [
        ("1f1b", 1, "none", 1),
        ("gpipe", 1, "none", 1),
        ("1f1b", 3, "none", 1 / 3),
        ("interleaved", 4, "full", 1 / 4),
        ("zb1p", 1, "none", 1 / 3),
        ("zb1p", 1, "full", 1 / 2),
        ("zbv", 2, "none", 1 / 6),
        ("dualpipev", 2, "none", 1 / 3),
    ],
)
def test_bubble(schedule: str, vpp: int, recompute: str, share: float) -> None:
    """Tests that the bubble is (p - 1) times one stage's time of a microbatch
    (`pipeline_bubbles.csv`).
    """
    model = replace(MODEL, vocab=1)  # makes all stages equal
    layout = planner.Layout(dp=4, tp=4, pp=4, vpp=vpp, schedule=schedule)
    found = planner.predict(model, CLUSTER, layout, replace(JOB, recompute=recompute))
    others = ("bubble", "gradients", "optimizer", "step", "straggler")
    microbatch_s = sum(v for kind, v in found.time.items() if kind not in others) / 16
    assert found.time["bubble"] == pytest.approx(3 * share * microbatch_s, rel=0.01)


def test_messages_of_interleaved_schedules() -> None:
    """Tests that only the messages that fill and drain the pipeline are exposed. The messages of
    each group of layers and microbatch slow the computation down that hides them.
    """
    job = replace(JOB, software="transformer-engine")
    layout = replace(LAYOUT, vpp=3)

    def sends(slowdown: float, **changes: int) -> planner.Prediction:
        constants = default_constants().changed(overlap_slowdown=slowdown)
        return planner.predict(MODEL, CLUSTER, layout, replace(job, **changes), constants=constants)

    found = [sends(0.0, global_batch=batch) for batch in (64, 128)]
    assert found[0].time["send"] == pytest.approx(found[1].time["send"]) and found[0].time["send"]
    assert "2 x (4 - 1) messages" in str(found[0].explain())
    message_s = found[0].time["send"] / (2 * 3)
    slow = sends(0.5).time["send"] - found[0].time["send"]
    assert slow == pytest.approx(0.5 * 16 * 2 * 3 * message_s)
    plain = planner.predict(MODEL, CLUSTER, LAYOUT, job)
    assert plain.time["send"] == pytest.approx(16 * 2 * message_s)
    old = planner.predict(MODEL, CLUSTER, layout, replace(job, software="megatron-2021"))
    assert old.time["send"] > plain.time["send"]


def test_hidden_gradients_slow_compute_down() -> None:
    """Tests the time that the exchange of gradients adds to a step. In newer software, this
    is the time of the last layer's share, plus a slowdown of the computation that hides the other
    shares. In older software, it is the time of the whole exchange.
    """
    constants = default_constants()
    cluster = replace(CLUSTER, link_Bps=CLUSTER.between_Bps)
    constants = constants.changed(link_share=1.0, network_share=1.0)
    fast = constants.changed(overlap_slowdown=0.0, straggler=0.0)
    slow = constants.changed(overlap_slowdown=1.0, straggler=0.0)
    model = replace(MODEL, tied=False)
    layout = planner.Layout(dp=16, tp=4, zero=1)
    job = replace(JOB, software="transformer-engine", micro_batch=4)
    hidden, exposed = (
        planner.predict(model, cluster, layout, job, constants=each).time["gradients"]
        for each in (fast, slow)
    )
    assert hidden == pytest.approx(exposed / model.layers)
    job = replace(job, software="megatron-2021")
    old = planner.predict(model, cluster, layout, job, constants=fast)
    assert old.time["gradients"] == pytest.approx(exposed)


@pytest.mark.parametrize("schedule", ["zb1p", "zbv", "dualpipev"])
def test_schedules_that_split_the_backward_pass_have_less_bubble(schedule: str) -> None:
    times = {
        name: planner.predict(MODEL, CLUSTER, replace(LAYOUT, vpp=None, schedule=name), JOB).time
        for name in ("gpipe", schedule)
    }
    assert times[schedule]["bubble"] < times["gpipe"]["bubble"]

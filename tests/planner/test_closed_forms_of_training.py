"""Exact formulas of published papers for FLOPs, model states and activations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono import planner
from unisono.planner.inputs.training_flops import step_flops, training_days
from unisono.planner.memory.activation_bytes import layer_activation_bytes
from unisono.planner.memory.stage_memory import MemoryModel

gpts = st.builds(
    lambda layers, heads, width, vocab: planner.Transformer(
        layers=layers, hidden=heads * width, heads=heads, vocab=vocab
    ),
    layers=st.integers(1, 200),
    heads=st.integers(1, 128),
    width=st.sampled_from([32, 64, 128, 160]),
    vocab=st.integers(1, 300_000),
)


@given(model=gpts, seq=st.integers(1, 10_000), batch=st.integers(1, 4000))
def test_flops_of_an_iteration(model: planner.Transformer, seq: int, batch: int) -> None:
    """Compares the FLOPs with formulas (2) and (3) in the appendix of arXiv 2104.04473."""
    layers, h, v = model.layers, model.hidden, model.vocab
    scale = batch * seq * layers * h**2
    full = 96 * scale * (1 + seq / (6 * h) + v / (16 * layers * h))
    none = 72 * scale * (1 + seq / (6 * h) + v / (12 * layers * h))
    step = step_flops
    assert step(model, seq=seq, batch=batch, recompute="full") == pytest.approx(full, rel=1e-12)
    assert step(model, seq=seq, batch=batch) == pytest.approx(none, rel=1e-12)
    selective = step(model, seq=seq, batch=batch, recompute="selective")
    assert selective == pytest.approx(none + 4 * scale * seq / h, rel=1e-12)


def test_days_of_training() -> None:
    """Compares with section 5.1 of arXiv 2104.04473: 34 days for GPT-3, and 84 days for one
    trillion parameters, for which the formula gives 83.
    """
    days = training_days
    assert round(days(tokens=300e9, parameters=175e9, devices=1024, rate=140e12)) == 34
    assert round(days(tokens=450e9, parameters=1e12, devices=3072, rate=163e12)) == 83


@given(
    model=gpts,
    seq=st.integers(1, 4096),
    batch=st.integers(1, 8),
    tp=st.sampled_from([1, 2, 4, 8]),
)
def test_activation_table(model: planner.Transformer, seq: int, batch: int, tp: int) -> None:
    """Compares the activations of a layer with all rows of table 2 of arXiv 2205.05198."""
    sbh = seq * batch * model.hidden
    a, h = model.heads, model.hidden

    def layer(**options: object) -> float:
        return layer_activation_bytes(model, seq=seq, batch=batch, **options)  # type: ignore[arg-type]

    rows = [
        (layer(), sbh * (34 + 5 * a * seq / h)),
        (layer(tp=tp), sbh * (10 + 24 / tp + 5 * a * seq / (h * tp))),
        (layer(tp=tp, sequence_parallel=True), sbh / tp * (34 + 5 * a * seq / h)),
        (layer(tp=tp, recompute="selective"), sbh * (10 + 24 / tp)),
        (layer(tp=tp, recompute="selective", sequence_parallel=True), 34 * sbh / tp),
        (layer(tp=tp, recompute="full"), 2 * sbh),
        (layer(tp=tp, recompute="full", sequence_parallel=True), 2 * sbh / tp),
    ]
    for found, formula in rows:
        assert found == pytest.approx(formula, rel=1e-12)


def test_fused_attention_keeps_no_scores() -> None:
    model = planner.load_model("gpt3-175b")
    found = layer_activation_bytes(model, seq=2048, batch=1, software="transformer-engine")
    sbh = 2048 * model.hidden
    assert found == pytest.approx(sbh * 32 + 4 * 2048 * model.heads)  # without dropout masks


@given(parameters=st.floats(1, 1e12), shards=st.integers(1, 4096))
def test_zero_table(parameters: float, shards: int) -> None:
    """Compares the bytes of model states with table 1 of arXiv 1910.02054, for K = 12."""
    formulas = (16.0, 4 + 12 / shards, 2 + 14 / shards, 16 / shards)
    for zero, formula in enumerate(formulas):
        found = sum(planner.state_bytes(parameters, zero=zero, shards=shards))
        assert found == pytest.approx(parameters * formula, rel=1e-12)


@pytest.mark.parametrize(("name", "devices"), [("gpt3-22b", 8), ("gpt3-175b", 64)])
def test_states_of_figure_1(name: str, devices: int) -> None:
    """Compares the bytes of model states with figure 1 of arXiv 2205.05198: 18 bytes x 12 L h^2 /
    (t p).
    """
    model = planner.load_model(name)
    parameters = 12 * model.layers * model.hidden**2 / devices
    found = sum(planner.state_bytes(parameters, zero=0, shards=1, gradient_bytes=4))
    assert found / 2**30 == pytest.approx(45.5625, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "tp", "pp", "vpp", "batch", "printed"),
    [
        ("gpt3-22b", 8, 1, 1, 4, 59.25),
        ("gpt3-175b", 8, 8, 3, 1, 66.84),
        ("gpt3-530b", 8, 35, 3, 1, 114.02),
        ("gpt3-1t", 8, 64, 1, 1, 131.25),
    ],
)
def test_activations_of_the_first_stage(
    name: str, tp: int, pp: int, vpp: int, batch: int, printed: float
) -> None:
    """Compares the first stage's activations with figure 1 of arXiv 2205.05198: L s b h (10 + 24 /
    t + 5 a s / (h t)), times 1 + (p - 1) / (p v) for interleaved schedules.
    """
    model = planner.load_model(name)
    job = planner.Workload(
        seq=2048,
        global_batch=batch * 1024,
        micro_batch=batch,
        precision="fp16",
        recompute="none",
        software="megatron-2021",
    )
    memory = MemoryModel(model, job, fragmentation=1.0)
    layout = planner.Layout(tp=tp, pp=pp, vpp=vpp)
    h, a, s = model.hidden, model.heads, 2048
    formula = model.layers * s * batch * h * (10 + 24 / tp + 5 * a * s / (h * tp))
    if vpp > 1:
        formula *= 1 + (pp - 1) / (pp * vpp)
    dropout_of_embedding = s * batch * h * pp * (1 + (pp - 1) / (pp * vpp) if vpp > 1 else 1)
    found = memory.stage(layout, batch, "none", 0)["activations"] - dropout_of_embedding
    assert found == pytest.approx(formula, rel=1e-12)
    assert found / 2**30 == pytest.approx(printed, abs=0.005)

"""Cost, energy, checkpoints and sensitivity, compared with closed forms and simulated failures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import planner
from unisono.planner.checkpoint_interval import daly_interval_s, goodput, young_interval_s
from unisono.planner.inputs.training_flops import step_flops, training_days

MODEL = planner.load_model("gpt3-22b")
CLUSTER = planner.Cluster.parse("a100:64")
LAYOUT = planner.Layout(dp=8, tp=8, sequence_parallel=True, zero=1)
JOB = planner.Workload(seq=2048, global_batch=64, micro_batch=1, recompute="selective")


@pytest.fixture(scope="module")
def step() -> planner.Prediction:
    return planner.predict(MODEL, CLUSTER, LAYOUT, JOB)


def test_cost_of_a_run(step: planner.Prediction) -> None:
    run = planner.training_run(step, tokens=1e9, price_per_hour=3.0, overhead=1.2)
    assert run.steps == np.ceil(1e9 / (64 * 2048))
    assert run.seconds == pytest.approx(run.steps * step.step_s)
    assert run.device_hours == pytest.approx(run.seconds * 64 / 3600)
    assert run.cost == pytest.approx(3 * run.device_hours)
    assert run.energy_kWh == pytest.approx(run.device_hours * 0.4 * 1.2)
    assert run.low_s < run.seconds < run.high_s
    half = planner.training_run(step, tokens=1e9, goodput=0.5, watts=200)
    assert half.seconds == pytest.approx(2 * run.seconds) and half.cost is None
    assert half.energy_kWh == pytest.approx(half.device_hours * 0.2)


def test_price_and_power_of_an_own_device(step: planner.Prediction) -> None:
    device = replace(CLUSTER.kind, price_per_hour=2.0, watts=None)
    found = planner.predict(MODEL, replace(CLUSTER, device=device), LAYOUT, JOB)
    run = planner.training_run(found, tokens=1e9)
    assert run.cost == pytest.approx(2 * run.device_hours) and run.energy_kWh is None
    with pytest.raises(ValueError, match="watts must be positive"):
        replace(CLUSTER.kind, watts=-1)


def test_formula_of_training_time() -> None:
    """Tests that `training_seconds` gives the days of the formula 6 T P / (n X)."""
    days = training_days(tokens=3e11, parameters=175e9, devices=1024, rate=140e12, recompute="none")
    seconds = planner.training_seconds(
        samples=3e11, work=6 * 175e9, rate=312e12, devices=1024, efficiency=140 / 312
    )
    assert seconds / 86400 == pytest.approx(days)


def test_predicted_run_agrees_with_the_formula(step: planner.Prediction) -> None:
    run = planner.training_run(step, tokens=1e12)
    seconds = planner.training_seconds(
        samples=1e12,
        work=step_flops(MODEL, seq=2048, batch=1) / 2048,
        rate=312e12,
        devices=64,
        efficiency=step.mfu,
    )
    assert run.seconds == pytest.approx(seconds, rel=1e-4)


@pytest.mark.parametrize(
    "values", [{"tokens": 0}, {"goodput": 1.5}, {"goodput": 0}, {"overhead": -1}]
)
def test_runs_that_cannot_exist(step: planner.Prediction, values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        planner.training_run(step, **{"tokens": 1e9, **values})
    with pytest.raises(ValueError, match="efficiency must be positive"):
        planner.training_seconds(samples=1, work=1, rate=1, devices=1, efficiency=0)


@settings(max_examples=40, deadline=None)
@given(checkpoint_s=st.floats(1, 600), failure_s=st.floats(3600, 1e6))
def test_daly_interval_is_the_best(checkpoint_s: float, failure_s: float) -> None:
    """Tests that none of many other intervals has a much better goodput than Daly's interval."""
    interval = daly_interval_s(checkpoint_s, failure_s)
    intervals = interval * np.geomspace(0.2, 5, 401)
    rates = {"checkpoint_s": checkpoint_s, "failure_s": failure_s, "restart_s": 100.0}
    best = max(goodput(float(each), **rates) for each in intervals)
    assert goodput(interval, **rates) > best * (1 - 1e-3)
    young = young_interval_s(checkpoint_s, failure_s)
    assert goodput(interval, **rates) >= goodput(young, **rates) - 1e-9


def test_goodput_of_simulated_failures() -> None:
    """Compares `goodput` with a simulated run in which failures happen at random times."""
    random = np.random.default_rng(0)
    interval, checkpoint, failure, restart, segments = 900.0, 60.0, 5000.0, 300.0, 20000
    clock = 0.0
    for _ in range(segments):
        need = interval + checkpoint
        while (until := random.exponential(failure)) < need:
            clock += until
            while (again := random.exponential(failure)) < restart:
                clock += again
            clock += restart
        clock += need
    simulated = interval * segments / clock
    found = goodput(interval, checkpoint_s=checkpoint, failure_s=failure, restart_s=restart)
    assert found == pytest.approx(simulated, rel=0.01)


def test_checkpoint_plan(step: planner.Prediction) -> None:
    plan = planner.checkpoint_plan(step, storage_Bps=1e10, failures_per_device_hour=1e-4)
    assert plan.checkpoint_bytes == 14 * MODEL.parameters
    assert plan.checkpoint_s == pytest.approx(plan.checkpoint_bytes / 1e10)
    assert plan.failure_s == pytest.approx(3600 / (64 * 1e-4))
    assert plan.steps == round(plan.interval_s / step.step_s)
    slow = planner.checkpoint_plan(step, storage_Bps=1e9, failures_per_device_hour=1e-4)
    assert slow.goodput < plan.goodput < 1 and slow.interval_s > plan.interval_s
    assert daly_interval_s(100, 40) == 40
    with pytest.raises(ValueError, match="storage_Bps must be positive"):
        planner.checkpoint_plan(step, storage_Bps=0)


@pytest.mark.parametrize(
    ("model", "cluster", "layout", "precision"),
    [
        ("gpt3-22b", "a100:64", LAYOUT, "fp16"),
        ("gpt3-22b", "a100:64", planner.Layout(dp=8, tp=4, pp=2, zero=1), "bf16"),
        ("llama3-8b", "h100:64", planner.Layout(dp=64, zero=3), "bf16"),
        ("qwen3-30b-a3b", "h100:64", planner.Layout(dp=64, ep=32, zero=1), "fp8"),
    ],
)
def test_elasticities_add_up_to_one(
    model: str, cluster: str, layout: planner.Layout, precision: str
) -> None:
    """Tests that 1 % less time follows if everything is 1 % faster (Euler's theorem)."""
    job = replace(JOB, precision=precision)
    rows = planner.sensitivity(
        planner.load_model(model), planner.Cluster.parse(cluster), layout, job
    )
    assert sum(row.elasticity for row in rows) == pytest.approx(1, abs=0.01)
    assert all(row.elasticity > -0.01 and row.saved > -1e-9 for row in rows)
    assert [row.saved for row in rows] == sorted((row.saved for row in rows), reverse=True)


def test_what_a_faster_network_saves(step: planner.Prediction) -> None:
    slow = replace(CLUSTER, network_Bps=1e8)
    rows = planner.sensitivity(MODEL, slow, LAYOUT, JOB, factor=4)
    assert rows[0].name == "rate of the network"
    faster = planner.predict(MODEL, replace(CLUSTER, network_Bps=4e8), LAYOUT, JOB)
    assert rows[0].improved_s == pytest.approx(faster.step_s)
    with pytest.raises(ValueError, match="factor must be over 1"):
        planner.sensitivity(MODEL, CLUSTER, LAYOUT, JOB, factor=1)


def test_more_memory_helps_open_choices() -> None:
    open_job = planner.Workload(seq=2048, global_batch=64)
    few, tight = planner.Cluster.parse("a100:8"), planner.Layout(tp=8, sequence_parallel=True)
    rows = {r.name: r for r in planner.sensitivity(MODEL, few, tight, open_job)}
    fixed = {r.name: r for r in planner.sensitivity(MODEL, few, tight, JOB)}
    assert rows["memory size"].saved > 0 and fixed["memory size"].saved == 0

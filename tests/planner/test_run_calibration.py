"""Calibration with the user's own runs: its effect, its file, and a search with calibrated
constants.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from math import exp, log
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import planner
from unisono.planner.validation.one_run_validation import one_run_errors

MODEL = planner.load_model("gpt3-7.5b")
CLUSTER = planner.Cluster.parse("a100:16")
LAYOUT = planner.Layout(dp=4, tp=4, sequence_parallel=True, zero=1)
JOB = planner.Workload(seq=2048, global_batch=64, micro_batch=2, recompute="selective")
SIGMA = planner.default_constants().sigma
PARTS = ("source", "model", "work", "run")
WHOLE = sum(SIGMA[name] ** 2 for name in PARTS)
SAME_MACHINE, SAME_MODEL, SAME_WORK = (
    sum(SIGMA[name] ** 2 for name in PARTS[:count]) / WHOLE for count in (1, 2, 3)
)


def own_run(factor: float, **changes: object) -> planner.MeasuredRun:
    """Returns a run whose measured time is `factor` times its prediction."""
    values = {"model": MODEL, "cluster": CLUSTER, "layout": LAYOUT, "job": JOB, **changes}
    step_s = planner.predict(**values).step_s  # type: ignore[arg-type]
    base = planner.measured_runs()[0]
    return replace(base, source="own", measured_s=factor * step_s, **values)  # type: ignore[arg-type]


def step(calibration: planner.Calibration | None, **changes: object) -> planner.Prediction:
    values = {"model": MODEL, "cluster": CLUSTER, "layout": LAYOUT, "job": JOB, **changes}
    return planner.predict(**values, calibration=calibration)  # type: ignore[arg-type]


def width(prediction: planner.Prediction) -> float:
    return log(prediction.high_s / prediction.low_s)


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, SAME_WORK),
        (
            {"cluster": replace(CLUSTER, devices=8), "layout": replace(LAYOUT, dp=2)},
            SAME_WORK,
        ),
        ({"layout": planner.Layout(dp=2, tp=8, zero=1)}, SAME_MODEL),
        ({"model": planner.load_model("gpt3-3.6b")}, SAME_MACHINE),
        # ZeRO-3, which runs in other software than the own run
        ({"layout": planner.Layout(dp=16, zero=3)}, 0.0),
        ({"cluster": planner.Cluster.parse("h100:16")}, 0.0),
    ],
)
def test_one_run(changes: dict[str, object], share: float) -> None:
    """Tests that one own run multiplies a prediction by the run's error (measured / predicted) to
    the power of `share`, the correlation of both errors. As in a conditional normal distribution,
    the interval shrinks by the factor sqrt(1 - share^2).
    """
    known = step(planner.calibrate(runs=[own_run(1.3)]), **changes)
    blind = step(None, **changes)
    assert known.step_s == pytest.approx(blind.step_s * 1.3**share)
    assert width(known) == pytest.approx(width(blind) * np.sqrt(1 - share**2))
    assert sum(known.time.values()) == pytest.approx(known.step_s)
    assert known.memory_bytes == blind.memory_bytes
    text = str(known.explain()).splitlines()[0]
    expected = "after 1 own run" if share else "no run of this device and software"
    assert expected in text


def test_several_runs_are_the_conditional_distribution() -> None:
    """Compares with the mean and variance of a joint normal distribution of which some values are
    known.
    """
    works = [LAYOUT, planner.Layout(dp=2, tp=8, zero=1), replace(LAYOUT, dp=4)]
    jobs = [JOB, JOB, replace(JOB, global_batch=128)]
    factors = [1.1, 0.9, 1.2]
    runs = [
        own_run(factor, layout=layout, job=job)
        for factor, layout, job in zip(factors, works, jobs, strict=True)
    ]
    known = step(planner.calibrate(runs=runs))
    near = SAME_MODEL
    same = SAME_WORK
    # rows: the three runs, then the predicted run, whose settings equal the first run's
    covariance = np.array(
        [[1, near, same, same], [near, 1, near, near], [same, near, 1, same], [same, near, same, 1]]
    )
    precision = np.linalg.inv(covariance)
    mean = -precision[3, :3] @ np.log(factors) / precision[3, 3]
    assert known.step_s / step(None).step_s == pytest.approx(exp(mean))
    shrunk = np.sqrt(1 / precision[3, 3])
    assert width(known) / width(step(None)) == pytest.approx(shrunk)
    assert known.effect.runs == 3


@settings(max_examples=20, deadline=None)
@given(factors=st.lists(st.floats(0.5, 2), min_size=1, max_size=5))
def test_more_runs_never_widen_the_interval(factors: list[float]) -> None:
    runs = [own_run(factor) for factor in factors]
    widths = [width(step(planner.calibrate(runs=runs[:n]))) for n in range(1, len(runs) + 1)]
    assert all(after <= before + 1e-12 for before, after in pairwise(widths))
    found = step(planner.calibrate(runs=runs)).step_s / step(None).step_s
    assert min(0.999, *factors) <= found <= max(1.001, *factors)


def test_file(tmp_path: Path) -> None:
    made = planner.calibrate(runs=[own_run(1.2), own_run(0.9, job=replace(JOB, micro_batch=4))])
    made.save(tmp_path / "mine.json")
    read = planner.Calibration.load(tmp_path / "mine.json")
    assert read == made and step(read).step_s == step(made).step_s
    document = json.loads((tmp_path / "mine.json").read_text())
    for change, message in (
        ({"format": "other"}, "unisono plan --calibrate"),
        ({"version": 9}, "expected version 1, found 9"),
        ({"runs": [{"name": "x"}]}, "damaged"),
        ({"runs": [{**document["runs"][0], "measured_s": -1}]}, "positive seconds"),
    ):
        with pytest.raises(ValueError, match=message):
            planner.Calibration.from_document({**document, **change})


def test_search_with_own_runs_is_exact() -> None:
    """Tests that a search with own runs finds the best layouts. One own run shows that the layout
    which seemed best is slower than predicted, so that other layouts become better.
    """
    job = planner.Workload(seq=2048, global_batch=64)
    blind = planner.search(MODEL, CLUSTER, job, keep=1)[0]
    slow = own_run(1.5, layout=blind.layout, job=blind.job)
    fast = own_run(0.8)
    calibration = planner.calibrate(runs=[slow, fast])
    found = planner.search(MODEL, CLUSTER, job, keep=5, calibration=calibration)
    for each in found:
        again = planner.predict(MODEL, CLUSTER, each.layout, each.job, calibration=calibration)
        assert again.step_s == pytest.approx(each.prediction.step_s)
    every = planner.search(MODEL, CLUSTER, job, keep=10**6)
    times = sorted(
        planner.predict(MODEL, CLUSTER, each.layout, each.job, calibration=calibration).step_s
        for each in every
    )
    assert [each.prediction.step_s for each in found] == pytest.approx(times[:5])
    assert found[0].layout != blind.layout


def test_validation_with_one_run_is_predict_with_a_calibration() -> None:
    runs = [run for run in planner.measured_runs() if run.source == "arXiv 2205.05198 table 5"]
    constants = planner.default_constants()
    blind = [planner.predict_run(run, constants) for run in runs]
    errors = []
    for own in runs:
        calibration = planner.calibrate(runs=[own])
        for other in runs:
            if other is not own:
                found = planner.predict(
                    other.model, other.cluster, other.layout, other.job, calibration=calibration
                )
                errors.append(abs(found.step_s / other.measured_s - 1))
    known = one_run_errors(runs, blind, constants)
    assert known is not None and known.error == pytest.approx(np.mean(errors))
    assert one_run_errors(runs[:1], blind[:1], constants) is None


def test_calibration_needs_something() -> None:
    with pytest.raises(ValueError, match="found none"):
        planner.calibrate()

"""Calibration with the user's own runs: its effect, its file, and a search with own runs."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants
from unisono.planner.constants.prediction_error import PARTS, PROPERTIES, group_of
from unisono.planner.own_measurements.measured_runs import MeasuredRun

MODEL = planner.load_model("gpt3-7.5b")
CLUSTER = planner.Cluster.parse("a100:16")
LAYOUT = planner.Layout(dp=4, tp=4, sequence_parallel=True, zero=1)
JOB = planner.Workload(seq=2048, global_batch=64, micro_batch=2, recompute="selective")
SIGMA = default_constants().sigma


def own_run(factor: float, **changes: object) -> MeasuredRun:
    """Returns a run whose measured time is `factor` times its prediction."""
    values = {"model": MODEL, "cluster": CLUSTER, "layout": LAYOUT, "job": JOB, **changes}
    step_s = planner.predict(**values).step_s  # type: ignore[arg-type]
    return MeasuredRun(name="own", measured_s=factor * step_s, **values)  # type: ignore[arg-type]


def step(calibration: planner.Calibration | None, **changes: object) -> planner.Prediction:
    values = {"model": MODEL, "cluster": CLUSTER, "layout": LAYOUT, "job": JOB, **changes}
    return planner.predict(**values, calibration=calibration)  # type: ignore[arg-type]


def width(prediction: planner.Prediction) -> float:
    return log(prediction.high_s / prediction.low_s)


def shares(prediction: planner.Prediction) -> list[float]:
    """Returns the weights of the parts of a dense 16-bit run's error, computed again."""
    seconds = dict.fromkeys(("compute", "exchange", "host"), 0.0)
    for kind, each in prediction.time.items():
        seconds[group_of(kind)] += each
    whole = sum(seconds.values())
    return [1.0, seconds["exchange"] / whole, seconds["host"] / whole, *[0.0] * len(PROPERTIES)]


def parts_of(known: planner.Prediction, blind: planner.Prediction) -> np.ndarray:
    """Returns the parts source, exchange and host of the error that give these factors."""
    kinds = ("matmul", "tensor", "step")
    compute, exchange, host = (known.time[kind] / blind.time[kind] for kind in kinds)
    further = [ratio / compute for ratio in (exchange, host)]
    return np.array([log(compute), *(x - 1 if x > 1 else log(x) for x in further)])


def test_factors_are_the_most_likely() -> None:
    """Tests that the density of the parts and of the own runs' errors is the largest at the parts
    that the factors show: Student's distributions of the source's part and of the single runs.
    """
    layouts = [LAYOUT, planner.Layout(dp=2, tp=8, sequence_parallel=True, zero=1)]
    layouts.append(planner.Layout(dp=8, tp=2, zero=1))
    factors = [1.3, 1.1, 2.0]
    runs = [own_run(f, layout=layout) for f, layout in zip(factors, layouts, strict=True)]
    known, blind = step(planner.calibrate(runs=runs)), step(None)
    rows = np.array([shares(step(None, layout=layout))[:3] for layout in layouts])
    prior = np.array([SIGMA[name] for name in PARTS[:3]])

    def cost(parts: np.ndarray) -> float:
        rest = (np.log(factors) - rows @ parts) / SIGMA["run"]
        away = parts / prior
        student = np.log1p(away[0] ** 2 / 3) + np.sum(np.log1p(rest**2 / 3))
        return float(2 * student + np.sum(away[1:] ** 2) / 2)

    found = parts_of(known, blind)
    for size in (1e-3, 1e-2):
        for direction in np.eye(3) * prior:
            near = cost(found + size * direction), cost(found - size * direction)
            assert cost(found) < min(near)
    assert sum(known.time.values()) == pytest.approx(known.step_s)
    assert known.memory_bytes == blind.memory_bytes
    assert known.own_runs == 3 and "after 3 own runs" in str(known.explain())


def test_an_exception_counts_for_less() -> None:
    """Tests that one run with a large error counts for a smaller share of it, and that three
    different runs with the same large error count almost completely.
    """
    found = [step(planner.calibrate(runs=[own_run(factor)])) for factor in (1.05, 1.3, 2.5)]
    counted = [
        log(each.step_s / step(None).step_s) / log(factor)
        for each, factor in zip(found, (1.05, 1.3, 2.5), strict=True)
    ]
    assert counted[0] > counted[1] > counted[2] > 0
    layouts = [LAYOUT, planner.Layout(dp=2, tp=8, zero=1), planner.Layout(dp=8, pp=2, zero=1)]
    three = planner.calibrate(runs=[own_run(1.6, layout=layout) for layout in layouts])
    assert step(three).step_s / step(None).step_s == pytest.approx(1.6, rel=0.12)
    contradicting = planner.calibrate(runs=[own_run(1.6), own_run(0.7)])
    assert width(step(contradicting)) > width(step(None))


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": planner.Layout(dp=16, zero=3)},  # other software
        {"cluster": planner.Cluster.parse("h100:16")},
    ],
)
def test_other_devices_and_software_are_not_changed(changes: dict[str, object]) -> None:
    calibration = planner.calibrate(runs=[own_run(1.3)])
    known, blind = step(calibration, **changes), step(None, **changes)
    assert known == blind and width(known) == width(blind)
    assert "no run with this device and software" in str(known.explain())


def test_the_interval_without_own_runs() -> None:
    """Compares with the sum of the parts' variances."""
    blind = step(None)
    parts = np.array(shares(blind)) * [SIGMA[name] for name in PARTS]
    assert blind.deviation == pytest.approx((parts @ parts + SIGMA["run"] ** 2) ** 0.5)
    assert width(blind) == pytest.approx(2 * 1.2816 * blind.deviation)
    found = step(None, job=replace(JOB, micro_batch=None))  # the planner chooses
    parts = np.array(shares(found)) * [SIGMA[name] for name in PARTS]
    variance = parts @ parts + SIGMA["not stated"] ** 2 + SIGMA["run"] ** 2
    assert found.deviation == pytest.approx(variance**0.5)


def test_more_runs_narrow_the_interval() -> None:
    runs = [own_run(1.2)] * 4
    found = [step(planner.calibrate(runs=runs[:n])) for n in (1, 2, 4)]
    widths = [width(step(None)), *map(width, found)]
    assert widths == sorted(widths, reverse=True)
    factors = [each.step_s / step(None).step_s for each in found]
    assert 1 < factors[0] < factors[1] < factors[2] < 1.2


def test_a_host_that_is_slow_is_told_from_slow_devices() -> None:
    """Tests that a long run of a small model, whose host is slow, changes a large model less."""
    small = planner.Transformer(layers=12, hidden=512, heads=8, vocab=1000)
    layout = planner.Layout(dp=16, zero=1)
    job = planner.Workload(seq=512, global_batch=16, micro_batch=1, recompute="none")
    same = {"model": small, "layout": layout, "job": job}
    assert shares(step(None, **same))[2] > 0.3
    calibration = planner.calibrate(runs=[own_run(2.0, **same)])
    large = {"layout": layout, "job": replace(JOB, recompute="full", micro_batch=1)}
    changed = [
        step(calibration, **each).step_s / step(None, **each).step_s for each in (same, large)
    ]
    assert changed[0] > 1.3 and changed[1] - 1 < 0.6 * (changed[0] - 1)


def test_file(tmp_path: Path) -> None:
    made = planner.calibrate(runs=[own_run(1.2), own_run(0.9, job=replace(JOB, micro_batch=4))])
    made.save(tmp_path / "mine.json")
    read = planner.Calibration.load(tmp_path / "mine.json")
    assert read == made and step(read).step_s == step(made).step_s
    document = json.loads((tmp_path / "mine.json").read_text())
    run = document["runs"][0]
    for change, message in (
        ({"format": "other"}, "unisono plan --calibrate"),
        ({"version": 2}, "expected version 3, found 2; make the file again"),
        ({"runs": [{"name": "x"}]}, "damaged"),
        ({"runs": [{**run, "measured_s": -1}]}, "positive seconds"),
        ({"runs": [{**run, "host": 2}]}, "shares between 0 and 1"),
        ({"runs": [{**run, "properties": ["old"]}]}, "found \\['old'\\]"),
    ):
        with pytest.raises(ValueError, match=message):
            planner.Calibration.from_document({**document, **change})


def test_search_with_own_runs_is_exact() -> None:
    """Tests that a search with own runs finds the best layouts, if they show that one software is
    slower than predicted, and its exchanges faster.
    """
    job = planner.Workload(seq=2048, global_batch=64)
    blind = planner.search(MODEL, CLUSTER, job, keep=1)[0]
    slow = own_run(1.7, layout=blind.layout, job=blind.job)
    fast = own_run(0.8, layout=planner.Layout(dp=2, tp=8, sequence_parallel=True, zero=1))
    other = own_run(1.6, layout=planner.Layout(dp=16, zero=3), job=replace(JOB, recompute="full"))
    calibration = planner.calibrate(runs=[slow, fast, other])
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


def test_calibration_needs_something() -> None:
    with pytest.raises(ValueError, match="found none"):
        planner.calibrate()

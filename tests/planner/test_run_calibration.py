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

from unisono import planner
from unisono.planner.constants.constant_covariance import ConstantCovariance
from unisono.planner.constants.error_distribution import ErrorDistribution, error_scales
from unisono.planner.validation.own_run_errors import own_run_errors

MODEL = planner.load_model("gpt3-7.5b")
CLUSTER = planner.Cluster.parse("a100:16")
LAYOUT = planner.Layout(dp=4, tp=4, sequence_parallel=True, zero=1)
JOB = planner.Workload(seq=2048, global_batch=64, micro_batch=2, recompute="selective")
SHIPPED = planner.default_constants()
SIGMA = SHIPPED.sigma
CERTAIN = SHIPPED.changed(covariance=ConstantCovariance())
"""The shipped constants without the part of the errors that wrong constants cause."""
SAME_MACHINE, SAME_MODEL, SAME_WORK = np.cumsum(
    [SIGMA[name] ** 2 for name in ("source", "model", "work")]
)


def own_run(factor: float, **changes: object) -> planner.MeasuredRun:
    """Returns a run whose measured time is `factor` times its prediction."""
    values = {"model": MODEL, "cluster": CLUSTER, "layout": LAYOUT, "job": JOB, **changes}
    step_s = planner.predict(**values).step_s  # type: ignore[arg-type]
    base = planner.measured_runs()[0]
    return replace(base, source="own", measured_s=factor * step_s, **values)  # type: ignore[arg-type]


def step(
    calibration: planner.Calibration | None,
    constants: planner.CalibratedConstants = SHIPPED,
    **changes: object,
) -> planner.Prediction:
    values = {"model": MODEL, "cluster": CLUSTER, "layout": LAYOUT, "job": JOB, **changes}
    return planner.predict(**values, constants=constants, calibration=calibration)  # type: ignore[arg-type]


def width(prediction: planner.Prediction) -> float:
    return log(prediction.high_s / prediction.low_s)


def conditional(
    covariance: np.ndarray, machine: np.ndarray, errors: list[float]
) -> tuple[list[float], list[float], list[float]]:
    """Returns the weights, means and deviations of the last of several errors if the others are
    known, one for each scale of the source and of the single run. `covariance` is that of the
    common parts; `machine` is 1 for errors on the same machine.
    """
    weights, means, deviations = [], [], []
    for source, probability in ((1, 0.99), (5, 0.01)):
        for x in np.arange(-2.5, 2.51, 0.5):
            both = covariance + (source**2 - 1) * SIGMA["source"] ** 2 * machine
            both = both + (SIGMA["run"] * exp(x)) ** 2 * np.eye(len(covariance))
            precision = np.linalg.inv(both)
            means.append(float(-precision[-1, :-1] @ errors / precision[-1, -1]))
            deviations.append(float(precision[-1, -1] ** -0.5))
            known = both[:-1, :-1]
            misfit = np.array(errors) @ np.linalg.solve(known, errors)
            density = exp(-misfit / 2) / np.sqrt(np.linalg.det(known))
            weights.append(probability * exp(-(x**2) / 2) * density)
    return [each / sum(weights) for each in weights], means, deviations


@pytest.mark.parametrize(
    ("changes", "common"),
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
def test_one_run(changes: dict[str, object], common: float) -> None:
    """Compares with the distribution of one error if another one is known. `common` is the variance
    of the parts that both have in common. Constants are certain here.
    """
    calibration = planner.calibrate(runs=[own_run(1.3)], constants=CERTAIN)
    known, blind = step(calibration, CERTAIN, **changes), step(None, CERTAIN, **changes)
    covariance = np.array([[SAME_WORK, common], [common, SAME_WORK]])
    same = float(common > 0)
    machine = np.array([[1, same], [same, 1]])
    weights, means, deviations = conditional(covariance, machine, [log(1.3)])
    other_device = "cluster" in changes and not common
    if other_device:
        weights = [each.weight for each in error_scales()]
    mean = float(np.dot(weights, means))
    assert known.step_s == pytest.approx(blind.step_s * exp(mean))
    random = np.random.default_rng(0)
    part = random.choice(len(weights), size=400_000, p=weights)
    errors = random.normal(np.array(means)[part], np.array(deviations)[part]) - mean
    inside = np.mean(np.abs(errors) < width(known) / 2)
    normal = np.mean(np.abs(random.normal(size=400_000)) < SHIPPED.interval_quantile)
    assert inside == pytest.approx(normal, abs=0.005)
    assert sum(known.time.values()) == pytest.approx(known.step_s)
    assert known.memory_bytes == blind.memory_bytes
    text = str(known.explain()).splitlines()[0]
    expected = "no run of this device" if other_device else "after 1 own run"
    assert expected in text


def test_several_runs_are_the_conditional_distribution() -> None:
    """Compares with the mean of a joint distribution of which some values are known."""
    works = [LAYOUT, planner.Layout(dp=2, tp=8, zero=1), replace(LAYOUT, dp=4)]
    jobs = [JOB, JOB, replace(JOB, global_batch=128)]
    factors = [1.1, 0.9, 1.2]
    runs = [
        own_run(factor, layout=layout, job=job)
        for factor, layout, job in zip(factors, works, jobs, strict=True)
    ]
    known = step(planner.calibrate(runs=runs, constants=CERTAIN), CERTAIN)
    near, same = SAME_MODEL, SAME_WORK
    # rows: the three runs, then the predicted run, whose settings equal the first run's
    covariance = np.full((4, 4), same)
    covariance[1, [0, 2, 3]] = covariance[[0, 2, 3], 1] = near
    weights, means, deviations = conditional(covariance, np.ones((4, 4)), list(np.log(factors)))
    mean = float(np.dot(weights, means))
    assert known.step_s / step(None, CERTAIN).step_s == pytest.approx(exp(mean))
    found = known.errors
    assert found.weights == pytest.approx(weights)
    assert found.means == pytest.approx([each - mean for each in means])
    assert found.deviations == pytest.approx(deviations)
    assert known.own_runs == 3


def test_experts_cause_an_error_of_the_single_run_too() -> None:
    """Tests a mixture of experts and a format of 8 bits: half of the error of experts is common to
    the model, half is that of the single run, and the error of the format is common to equal work.
    """
    model = replace(MODEL, experts=8, top_k=2, expert_ffn=1024)
    changes = {"model": model, "job": replace(JOB, precision="fp8")}
    cluster = planner.Cluster.parse("h100:16")
    calibration = planner.calibrate(
        runs=[own_run(1.3, cluster=cluster, **changes)], constants=CERTAIN
    )
    half = SIGMA["experts"] ** 2 / 2
    for layout, common in (
        (LAYOUT, SAME_WORK + half + SIGMA["low precision"] ** 2),
        (planner.Layout(dp=2, tp=8, zero=1), SAME_MODEL + half),
    ):
        blind, known = (
            step(each, CERTAIN, cluster=cluster, layout=layout, **changes)
            for each in (None, calibration)
        )
        whole = SAME_WORK + 2 * half + SIGMA["low precision"] ** 2
        covariance = np.array([[whole, common], [common, whole]])
        weights, means, deviations = conditional(covariance, np.ones((2, 2)), [log(1.3)])
        mean = float(np.dot(weights, means))
        assert known.step_s / blind.step_s == pytest.approx(exp(mean))
        assert known.errors.deviations == pytest.approx(deviations)


def test_own_runs_change_the_constants() -> None:
    """Compares with the most likely constants: those that minimise the sum of the squares of the
    errors and of the constants' changes, both in standard deviations. The parts that have scales
    are certain here, so that the distribution is normal.
    """
    sigma = {**SIGMA, "source": 0.0, "run": 1e-9}
    constants = SHIPPED.changed(sigma=sigma)
    layouts = [LAYOUT, planner.Layout(dp=2, tp=8, zero=1), planner.Layout(dp=16, zero=3)]
    factors = [1.2, 1.1, 0.8]
    runs = [own_run(f, layout=layout) for f, layout in zip(factors, layouts, strict=True)]
    blind = [step(None, constants, layout=layout) for layout in layouts]
    gradients = np.array([each.derivatives for each in blind])
    part = (SAME_WORK - SAME_MACHINE) * np.eye(3)
    part[0, 1] = part[1, 0] = SAME_MODEL - SAME_MACHINE  # ZeRO-3 runs in other software
    factor = constants.covariance.matrix()
    weighted = gradients @ factor
    information = np.eye(len(factor)) + weighted.T @ np.linalg.solve(part, weighted)
    right = weighted.T @ np.linalg.solve(part, np.log(factors))
    changes = factor @ np.linalg.solve(information, right)

    calibration = planner.calibrate(runs=runs, constants=constants)
    posterior = calibration.own_runs(CLUSTER, constants)
    assert posterior is not None
    moved = posterior.constants
    for name, change in zip(constants.covariance.names, changes, strict=True):
        assert moved.covariance == constants.covariance
        expected = constants.scaled(name, exp(change))
        group, _, key = name.partition("/")
        found, wanted = getattr(moved, group), getattr(expected, group)
        assert (found[key] if key else found) == pytest.approx(wanted[key] if key else wanted)
    # The changed constants and the factor explain the three errors almost completely.
    for layout, run in zip(layouts, runs, strict=True):
        assert step(calibration, constants, layout=layout).step_s == pytest.approx(
            run.measured_s, rel=0.02
        )


def test_a_surprising_run_counts_for_less() -> None:
    """Tests that one run with a large error counts for a smaller share of it, and that runs which
    contradict each other widen the interval, while runs which agree make it narrower.
    """
    shares = []
    for factor in (1.05, 1.3, 1.8):
        found = step(planner.calibrate(runs=[own_run(factor)]))
        shares.append(log(found.step_s / step(None).step_s) / log(factor))
    assert shares[0] > shares[1] > shares[2] > 0
    agreeing = [own_run(1.1)] * 4
    widths = [width(step(planner.calibrate(runs=agreeing[:n]))) for n in (1, 2, 4)]
    assert width(step(None)) > widths[0] > widths[1] > widths[2]
    contradicting = [own_run(1.1), own_run(0.7)]
    assert width(step(planner.calibrate(runs=contradicting))) > widths[0]


def test_an_unusual_machine_is_found() -> None:
    """Tests that one run which takes twice the predicted time may be a single exception, and that
    three different runs which do so are not.
    """
    layouts = [LAYOUT, planner.Layout(dp=2, tp=8, zero=1), planner.Layout(dp=8, pp=2, zero=1)]
    runs = [own_run(2.0, layout=layout) for layout in layouts]
    other = planner.Layout(dp=8, tp=2, zero=1)
    blind = step(None, layout=other).step_s
    one, three = (step(planner.calibrate(runs=runs[:n]), layout=other) for n in (1, 3))
    assert 1.1 < one.step_s / blind < 1.7
    assert three.step_s / blind == pytest.approx(2, rel=0.1)
    assert width(three) < width(step(None, layout=other)) < width(one)


def test_a_mixture_of_normal_distributions() -> None:
    """Compares probabilities with drawn values."""
    weights, means, deviations = [0.5, 0.3, 0.2], [-0.1, 0.1, 0.1], [0.05, 0.1, 0.4]
    mixture = ErrorDistribution(weights=weights, means=means, deviations=deviations)
    random = np.random.default_rng(1)
    part = random.choice(3, size=400_000, p=weights)
    drawn = np.abs(random.normal(np.array(means)[part], np.array(deviations)[part]))
    for size in (0.05, 0.2, 0.6):
        assert mixture.within(size) == pytest.approx(np.mean(drawn < size), abs=0.004)
    half = mixture.half_width(1.2816)
    assert half == pytest.approx(np.quantile(drawn, 0.8), rel=0.01)
    assert mixture.within(half) == pytest.approx(0.8, abs=1e-4)
    widths = [mixture.half_width(quantile) for quantile in (0.5, 1.0, 2.0, 3.0)]
    assert all(less < more for less, more in pairwise(widths))


def test_file(tmp_path: Path) -> None:
    made = planner.calibrate(runs=[own_run(1.2), own_run(0.9, job=replace(JOB, micro_batch=4))])
    made.save(tmp_path / "mine.json")
    read = planner.Calibration.load(tmp_path / "mine.json")
    assert read == made and step(read).step_s == step(made).step_s
    document = json.loads((tmp_path / "mine.json").read_text())
    for change, message in (
        ({"format": "other"}, "unisono plan --calibrate"),
        ({"version": 9}, "expected version 2, found 9"),
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


def test_validation_with_own_runs_is_predict_with_a_calibration() -> None:
    runs = [run for run in planner.measured_runs() if run.source == "arXiv 2205.05198 table 5"]
    blind = [planner.predict_run(run, SHIPPED) for run in runs]
    errors, inside = [], []
    for own in runs:
        calibration = planner.calibrate(runs=[own])
        for other in runs:
            if other is not own:
                found = planner.predict(
                    other.model, other.cluster, other.layout, other.job, calibration=calibration
                )
                errors.append(abs(found.step_s / other.measured_s - 1))
                inside.append(found.low_s <= other.measured_s <= found.high_s)
    known = own_run_errors(runs, blind, SHIPPED, 1)
    assert known is not None and known.error == pytest.approx(np.mean(errors))
    assert known.covered == pytest.approx(np.mean(inside))
    before = [abs(each.step_s / run.measured_s - 1) for run, each in zip(runs, blind, strict=True)]
    assert known.blind_error == pytest.approx(np.mean(before))
    assert own_run_errors(runs[:1], blind[:1], SHIPPED, 1) is None
    assert own_run_errors(runs[:3], blind[:3], SHIPPED, 3) is None


def test_each_predicted_run_counts_once() -> None:
    """Tests two sources of 2 and 3 runs: the mean over the five runs, not over the eight pairs."""
    base = own_run(1.0)
    factors = {"two": (1.0, 1.2), "three": (1.0, 1.0, 0.7)}
    runs, blind = [], []
    for source, values in factors.items():
        for factor in values:
            runs.append(replace(base, source=source, measured_s=factor * base.measured_s))
            blind.append(planner.predict_run(runs[-1], SHIPPED))
    found = own_run_errors(runs, blind, SHIPPED, 1)
    alone = [own_run_errors(runs[a:b], blind[a:b], SHIPPED, 1) for a, b in ((0, 2), (2, 5))]
    assert found is not None and alone[0] is not None and alone[1] is not None
    assert found.error == pytest.approx((2 * alone[0].error + 3 * alone[1].error) / 5)


def test_calibration_needs_something() -> None:
    with pytest.raises(ValueError, match="found none"):
        planner.calibrate()

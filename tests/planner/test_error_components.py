"""The parts of errors that runs have in common: recovered from made-up errors, and closed forms."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from unisono import planner
from unisono.planner.calibration.error_components import (
    BASE,
    ErrorGroups,
    central_quantile,
    constants_factor,
    fit_sigma,
)
from unisono.planner.constants.constant_covariance import (
    ConstantCovariance,
    covariances_from,
    covariances_text,
)
from unisono.planner.constants.run_similarity import similarity
from unisono.planner.prediction_error import error_deviation, log_gradient
from unisono.planner.run_choices import RunModel
from unisono.planner.validation.validation import fold_constants

BASE_RUN = next(run for run in planner.measured_runs() if run.source == "llm-foundry MPT")
MODELS = [planner.load_model(name) for name in ("gpt3-1.7b", "gpt3-3.6b")]
PRIORS = dict.fromkeys((*BASE, "experts", "low precision"), 0.1)


def made_up_runs(sources: int) -> list[planner.MeasuredRun]:
    """Returns runs of made-up sources: two models, two kinds of work, two batches each."""
    return [
        replace(
            BASE_RUN,
            source=f"made up {source}",
            model=model,
            layout=planner.Layout(dp=8 // tp, tp=tp, zero=3),
            job=replace(BASE_RUN.job, micro_batch=1, global_batch=batch, recompute="none"),
        )
        for source in range(sources)
        for model in MODELS
        for tp in (1, 2)
        for batch in (8, 16)
    ]


def made_up_errors(sources: int, sigma: dict[str, float]) -> np.ndarray:
    """Returns errors of these runs, drawn part by part."""
    random = np.random.default_rng(3)
    shape = (sources, 2, 2, 2)
    parts = [
        sigma["source"] * random.normal(size=(sources, 1, 1, 1)),
        sigma["model"] * random.normal(size=(sources, 2, 1, 1)),
        sigma["work"] * random.normal(size=(sources, 2, 2, 1)),
        sigma["run"] * random.normal(size=shape),
    ]
    return np.ravel(np.sum([np.broadcast_to(part, shape) for part in parts], axis=0))


@pytest.mark.parametrize(
    "hidden",
    [
        {"source": 0.12, "model": 0.05, "work": 0.06, "run": 0.03},
        {"source": 0.09, "model": 0.1, "work": 0.06, "run": 0.08},
    ],
)
def test_hidden_parts_are_found(hidden: dict[str, float]) -> None:
    pytest.importorskip("scipy")
    groups = ErrorGroups(made_up_runs(45))
    errors = made_up_errors(45, hidden)
    none = np.zeros((len(errors), 1))
    found = fit_sigma(groups, errors, none, np.zeros(1), np.ones(1), PRIORS)
    for name in BASE:
        assert found[name] == pytest.approx(hidden[name], rel=0.25), name
    # no run has experts, so their part keeps its value
    assert found["experts"] == PRIORS["experts"]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_own_runs_have_the_same_covariance(precision: str) -> None:
    """Tests that a calibration by own runs uses the covariance that was fitted to the sources."""
    sigma = planner.default_constants().sigma
    runs = [replace(run, job=replace(run.job, precision=precision)) for run in made_up_runs(1)]
    likes = [similarity(run.model, run.cluster, run.layout, run.job) for run in runs]
    found = np.array([[a.covariance(b, sigma) for a in likes] for b in likes])
    np.fill_diagonal(found, [like.variance(sigma) for like in likes])
    assert found == pytest.approx(ErrorGroups(runs).covariance(sigma))


def test_a_cause_of_some_runs_is_half_common_to_a_model() -> None:
    runs = made_up_runs(1)
    open_job = replace(runs[0].job, micro_batch=None)
    runs[:2] = [replace(run, job=open_job) for run in runs[:2]]
    sigma = {"source": 0.3, "model": 0.2, "work": 0.1, "run": 0.1, "not stated": 0.4}
    found = ErrorGroups(runs).covariance(sigma)
    assert found[0, 0] == pytest.approx(0.09 + 0.04 + 0.01 + 0.01 + 0.16)
    assert found[0, 1] == pytest.approx(0.09 + 0.04 + 0.01 + 0.08)
    assert found[0, 2] == pytest.approx(0.09 + 0.04)  # the other run states all choices
    assert found[2, 2] == pytest.approx(0.09 + 0.04 + 0.01 + 0.01)
    assert found[1, 7] == pytest.approx(0.09)  # another model of the same source


@pytest.mark.parametrize(("sources", "runs"), [(1, 1), (1, 100), (5, 3)])
def test_the_covariance_of_constants_has_a_closed_form(sources: int, runs: int) -> None:
    """Tests one constant that multiplies all times. The mean of the n runs of a source has the
    variance source^2 + run^2 / n, so many runs of one source do not make the constant certain.
    """
    shared, single, width = 0.1, 0.05, 0.4
    same = np.kron(np.eye(sources), np.ones((runs, runs)))
    covariance = shared**2 * same + single**2 * np.eye(sources * runs)
    found = constants_factor(covariance, np.ones((sources * runs, 1)), np.array([width]))
    expected = 1 / (width**-2 + sources / (shared**2 + single**2 / runs))
    assert found[0, 0] ** 2 == pytest.approx(expected)


def test_the_variance_of_a_step_is_that_of_sampled_constants() -> None:
    """Draws constants from their covariance and predicts the step with each draw."""
    shipped = planner.default_constants()
    rows = shipped.covariance.factor
    less = tuple(tuple(x / 4 for x in row) for row in rows)  # small, so that times are linear
    constants = shipped.changed(covariance=replace(shipped.covariance, factor=less))
    layout = planner.Layout(dp=2, tp=4, zero=1)
    cluster, job = planner.Cluster.parse("a100:8"), BASE_RUN.job
    job = replace(job, precision="fp16", micro_batch=1, global_batch=16, recompute="none")
    run = RunModel(MODELS[0], cluster, job, constants)
    random = np.random.default_rng(0)
    draws = random.normal(size=(400, len(rows))) @ constants.covariance.matrix().T
    times = []
    for draw in draws:
        drawn = constants
        for name, x in zip(constants.covariance.names, draw, strict=True):
            drawn = drawn.scaled(name, float(np.exp(x)))
        times.append(sum(run.times.with_constants(drawn).step(layout, 1, "none").values()))
    gradient = log_gradient(run.times, constants.covariance.names, layout, 1, "none")
    variance = constants.covariance.variance(gradient)
    assert np.sqrt(variance) == pytest.approx(np.std(np.log(times)), rel=0.15)
    others = sum(constants.sigma[name] ** 2 for name in BASE)
    assert error_deviation(run, layout, 1, "none") ** 2 == pytest.approx(others + variance)


def test_a_device_without_runs_is_less_certain() -> None:
    """Tests that wrong constants explain a larger error if no run of the device was fitted."""
    model = planner.load_model("llama3-70b")
    layout = planner.Layout(dp=8, zero=3)
    nothing_else = dict.fromkeys(planner.default_constants().sigma, 0.0)

    def deviation(device: str, constants: planner.CalibratedConstants) -> float:
        precision = "fp8" if device == "b200" else "bf16"
        job = planner.Workload(seq=8192, global_batch=64, precision=precision)
        cluster = planner.Cluster.parse(f"{device}:8")
        constants = constants.changed(sigma=nothing_else)
        return planner.predict(model, cluster, layout, job, constants=constants).deviation

    shipped = planner.default_constants()
    without = fold_constants()["Megatron-Bridge"]  # no other family has Blackwell devices
    assert deviation("b200", without) > 1.3 * deviation("b200", shipped)
    assert deviation("a100", without) == pytest.approx(deviation("a100", shipped), rel=0.1)
    assert deviation("b200", without) > 1.5 * deviation("a100", without)


def test_quantile_covers_errors_and_groups() -> None:
    errors = [0.1, -0.2, 0.3, -0.4, 5.0]
    assert central_quantile(errors, ["a"] * 5, 0.8) == 0.4
    # four errors of one group count as much as one error of the other
    assert central_quantile(errors, ["a"] * 4 + ["b"], 0.5) == 0.4
    assert central_quantile(errors, ["a"] * 4 + ["b"], 0.6) == 5.0
    # half of the errors of both groups are small, but 0.6 of all errors are large
    assert central_quantile([0.1, 1.0, 1.0, 1.0, 0.1], ["a"] * 4 + ["b"], 0.5) == 1.0


def test_file_of_covariances() -> None:
    shipped = planner.default_constants().covariance
    certain = ConstantCovariance(names=shipped.names, factor=((),) * len(shipped.names))
    read = covariances_from(json.loads(covariances_text({"all": shipped, "x": certain})))
    assert read["all"] == shipped
    assert read["x"].variance(np.ones(len(shipped.names))) == 0

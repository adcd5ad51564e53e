"""The parts of errors that runs have in common: recovered from made-up errors, and closed forms."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from unisono import planner
from unisono.planner.calibration.error_components import (
    ErrorGroups,
    ErrorLikelihood,
    ErrorParts,
    constants_factor,
    fit_parts,
)
from unisono.planner.calibration.interval_width import (
    COVERED,
    COVERED_JUDGED,
    interval_quantile,
    weighted_quantile,
)
from unisono.planner.constant_derivatives import gradient_of, log_gradient
from unisono.planner.constants.constant_covariance import (
    ConstantCovariance,
    covariances_from,
    covariances_text,
)
from unisono.planner.constants.run_similarity import EVERY_RUN, similarity
from unisono.planner.run_choices import RunModel
from unisono.planner.validation.own_run_errors import own_run_errors
from unisono.planner.validation.predicted_runs import fold_constants

BASE_RUN = next(run for run in planner.measured_runs() if run.source == "llm-foundry MPT")
MODELS = [planner.load_model(name) for name in ("gpt3-1.7b", "gpt3-3.6b")]
PRIORS = dict.fromkeys((*EVERY_RUN, "experts", "low precision"), 0.1)


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


def likelihood(groups: ErrorGroups, errors: np.ndarray) -> ErrorLikelihood:
    """Returns the likelihood without uncertain constants."""
    none = np.zeros((len(errors), 1))
    return ErrorLikelihood(groups, errors, none, np.zeros(1), np.ones(1), PRIORS)


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
    found = fit_parts(likelihood(groups, errors), groups).sigma
    for name in EVERY_RUN:
        assert found[name] == pytest.approx(hidden[name], rel=0.25), name
    # no run has experts, so their part keeps its value
    assert found["experts"] == PRIORS["experts"]


def test_a_source_that_repeats_badly_is_found() -> None:
    """Tests that the scale of the single run is large in the sources with large single errors, and
    that these sources do not change the part of the other sources much.
    """
    pytest.importorskip("scipy")
    hidden = {"source": 0.05, "model": 0.03, "work": 0.05, "run": 0.02}
    errors = made_up_errors(20, hidden)
    random = np.random.default_rng(4)
    errors[:16] += 0.3 * random.normal(size=16)  # the first two sources
    groups = ErrorGroups(made_up_runs(20))
    found = fit_parts(likelihood(groups, errors), groups)
    assert min(found.run_scales[:2]) > 3 * max(found.run_scales[2:])
    assert found.sigma["run"] == pytest.approx(0.02, rel=0.4)


def test_the_slope_of_the_likelihood_is_that_of_differences() -> None:
    pytest.importorskip("scipy")
    runs = made_up_runs(3)
    runs[3] = replace(runs[3], job=replace(runs[3].job, precision="fp8"))
    groups = ErrorGroups(runs)
    random = np.random.default_rng(5)
    count, constants = len(runs), 2
    found = ErrorLikelihood(
        groups,
        0.1 * random.normal(size=count),
        random.normal(size=(count, constants)),
        np.array([0.1, -0.2]),
        np.array([0.3, 0.2]),
        PRIORS,
    )
    assert groups.names == (*EVERY_RUN, "low precision")
    logs = 0.5 * random.normal(size=len(groups.names) + 3)
    _, slopes = found.cost(logs)
    for i, slope in enumerate(slopes):
        change = 1e-5 * np.eye(len(logs))[i]
        difference = found.cost(logs + change)[0] - found.cost(logs - change)[0]
        assert slope == pytest.approx(difference / 2e-5, rel=1e-4, abs=1e-4), i


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("experts", [0, 8])
def test_own_runs_have_the_same_covariance(precision: str, experts: int) -> None:
    """Tests that a calibration by own runs uses the covariance that was fitted to the sources."""
    sigma = planner.default_constants().sigma
    runs = [
        replace(
            run,
            job=replace(run.job, precision=precision),
            model=replace(
                run.model, experts=experts, top_k=min(experts, 2), expert_ffn=1024 * bool(experts)
            ),
        )
        for run in made_up_runs(1)
    ]
    likes = [similarity(run.model, run.cluster, run.layout, run.job) for run in runs]
    found = np.array([[a.shared_variance(b, sigma) for a in likes] for b in likes])
    scale = 1.7
    found += np.diag([a.single_variance(sigma) + (scale * sigma["run"]) ** 2 for a in likes])
    parts = ErrorParts(sigma=sigma, run_scales=np.array([scale]))
    assert found == pytest.approx(ErrorGroups(runs).covariance(parts))


def test_a_cause_of_some_runs_is_common_to_equal_work() -> None:
    runs = made_up_runs(1)
    open_job = replace(runs[0].job, micro_batch=None)
    runs[:2] = [replace(run, job=open_job) for run in runs[:2]]
    sigma = {"source": 0.3, "model": 0.2, "work": 0.1, "run": 0.1, "not stated": 0.4}
    found = ErrorGroups(runs).covariance(ErrorParts(sigma=sigma, run_scales=np.ones(1)))
    assert found[0, 0] == pytest.approx(0.09 + 0.04 + 0.01 + 0.01 + 0.16)
    assert found[0, 1] == pytest.approx(0.09 + 0.04 + 0.01 + 0.16)
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
    common = sum(constants.sigma[name] ** 2 for name in EVERY_RUN[:-1])
    errors = run.blind.errors(run.similarity(layout, 1, "none"), gradient)
    assert errors.deviations[5] ** 2 == pytest.approx(  # both scales are 1
        common + constants.sigma["run"] ** 2 + variance
    )


@pytest.mark.parametrize("cluster", ["a100:8", "h100:8"])
def test_derivatives_of_kept_models(cluster: str) -> None:
    """Compares derivatives, twice, with those of models that are made again for each constant."""
    constants = planner.default_constants()
    names = (*constants.covariance.names, "dlrm_step_s")
    run = RunModel(MODELS[0], planner.Cluster.parse(cluster), BASE_RUN.job, constants)
    for tp in (2, 4):
        layout = planner.Layout(dp=8 // tp, tp=tp, zero=1)

        def step_s(changed: planner.CalibratedConstants, layout: planner.Layout = layout) -> float:
            return sum(run.times.with_constants(changed).step(layout, 1, "none").values())

        expected = gradient_of(step_s, constants, names)
        assert np.count_nonzero(expected) > 10
        for _ in range(2):
            found = log_gradient(run.times, names, layout, 1, "none")
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)


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


def test_the_smallest_size_that_covers_a_share() -> None:
    sizes = [0.1, 0.3, 0.2, 5.0, 0.4]
    assert weighted_quantile(sizes, [1.0] * 5, 0.8) == 0.4
    # four errors of one group count as much as one error of the other
    assert weighted_quantile(sizes, [0.25, 0.25, 0.25, 1.0, 0.25], 0.5) == 0.4
    assert weighted_quantile(sizes, [0.25, 0.25, 0.25, 1.0, 0.25], 0.6) == 5.0


def test_the_width_is_the_smallest_that_covers_all_counts() -> None:
    """Compares the quantile with the shares of runs inside intervals of this width."""
    runs = [run for run in planner.measured_runs() if run.source == "arXiv 2205.05198 table 5"]
    every, fold = planner.default_constants(), fold_constants()[runs[0].family]
    quantile = interval_quantile(runs, every, {runs[0].family: fold})

    def least_surplus(quantile: float) -> float:
        shares = []
        for fitted in (every, fold):
            constants = fitted.changed(interval_quantile=quantile)
            steps = [planner.predict_run(run, constants) for run in runs]
            inside = [a.low_s <= b.measured_s <= a.high_s for a, b in zip(steps, runs, strict=True)]
            shares.append(np.mean(inside))
        for count in (1, 2, 3):
            found = own_run_errors(runs, steps, constants, count)
            assert found is not None
            shares.append(found.covered)
        constants = every.changed(interval_quantile=quantile)
        judged: dict[str, list[bool]] = {}
        for run in planner.judged_runs():
            step = planner.predict_run(run, constants)
            judged.setdefault(run.source, []).append(step.low_s <= run.measured_s <= step.high_s)
        whole = [each for those in judged.values() for each in those]
        of_judged = min(np.mean(whole), np.mean([np.mean(those) for those in judged.values()]))
        return float(min(min(shares) - COVERED, of_judged - COVERED_JUDGED))

    assert least_surplus(1.001 * quantile) >= 0 > least_surplus(0.999 * quantile)


def test_file_of_covariances() -> None:
    shipped = planner.default_constants().covariance
    certain = ConstantCovariance(names=shipped.names, factor=((),) * len(shipped.names))
    read = covariances_from(json.loads(covariances_text({"all": shipped, "x": certain})))
    assert read["all"] == shipped
    assert read["x"].variance(np.ones(len(shipped.names))) == 0

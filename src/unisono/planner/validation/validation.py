"""Errors of the planner on published runs, with constants fitted with or without their families."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from unisono.planner.constants.calibrated_constants import (
    CalibratedConstants,
    constants_document,
    constants_from,
    default_constants,
)
from unisono.planner.constants.constant_covariance import constant_covariances
from unisono.planner.prediction import Prediction, predict
from unisono.planner.validation.ground_truth import MeasuredRun, measured_runs
from unisono.planner.validation.one_run_validation import one_run_errors

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class ErrorRow:
    """Errors on the runs of one family."""

    family: str
    runs: int
    fitted: float
    """Mean absolute error of the step time with the shipped constants, which were also fitted to
    these runs."""
    held_out: float
    """Mean absolute error with constants that were fitted to all other families."""
    worst: float
    """Largest absolute error with held-out constants (fitted to all other families)."""
    bias: float
    """Mean logarithm of measured over predicted time, with held-out constants."""
    spread: float
    """Standard deviation of this logarithm in the family."""
    covered: float
    """Share of runs inside the 80 % interval, with held-out constants."""
    width: float
    """Median ratio of the upper to the lower end of the interval, with held-out constants."""
    fitted_covered: float
    """Share of runs inside the 80 % interval, with the shipped constants."""
    fitted_width: float
    """Median ratio of the upper to the lower end of the interval, with the shipped constants."""
    tau: float | None
    """Kendall's rank correlation in groups of runs that differ only in layout, with held-out
    constants."""
    regret: float | None
    """Ratio of the measured time of the predicted best layout to the best measured time, minus 1,
    with held-out constants."""
    one_run: float | None = None
    """Mean absolute error with held-out constants, after calibration with one other run of the
    source. None if no source has two runs."""
    one_run_covered: float | None = None
    """Share of runs inside the 80 % interval after calibration with one other run."""
    one_run_width: float | None = None
    """Median ratio of the interval's ends after calibration with one other run."""


@dataclass(frozen=True, kw_only=True)
class MemoryComparison:
    """A run with published memory, and the prediction for it."""

    run: MeasuredRun
    predicted_bytes: int


def predict_run(run: MeasuredRun, constants: CalibratedConstants) -> Prediction:
    """Returns the prediction of a measured run."""
    return predict(run.model, run.cluster, run.layout, run.job, constants=constants)


def validate(runs: Sequence[MeasuredRun] | None = None) -> list[ErrorRow]:
    """Returns the errors by family. The default runs are all that the package ships.

    Mixtures of experts and dense models of one family are separate rows. Families that the
    constants were not fitted to have equal fitted and held-out errors.
    """
    given = measured_runs() if runs is None else runs
    return [_error_row(family, members) for family, members in _by_key(given, row_name)]


def _error_row(family: str, members: list[MeasuredRun]) -> ErrorRow:
    fold = fold_constants().get(members[0].family, default_constants())
    fitted = [predict_run(run, default_constants()) for run in members]
    held = [predict_run(run, fold) for run in members]
    measured = np.array([run.measured_s for run in members])
    errors = np.array([each.step_s for each in held]) / measured - 1
    fitted_errors = np.array([each.step_s for each in fitted]) / measured - 1
    logs = -np.log1p(errors)
    covered, width = _intervals(members, held)
    fitted_covered, fitted_width = _intervals(members, fitted)
    tau, regret = ranking(members, [each.step_s for each in held])
    known = one_run_errors(members, held, fold)
    return ErrorRow(
        family=family,
        runs=len(members),
        fitted=float(np.mean(np.abs(fitted_errors))),
        held_out=float(np.mean(np.abs(errors))),
        worst=float(np.max(np.abs(errors))),
        bias=float(np.mean(logs)),
        spread=float(np.std(logs)),
        covered=covered,
        width=width,
        fitted_covered=fitted_covered,
        fitted_width=fitted_width,
        tau=tau,
        regret=regret,
        one_run=None if known is None else known.error,
        one_run_covered=None if known is None else known.covered,
        one_run_width=None if known is None else known.width,
    )


def _intervals(
    runs: Sequence[MeasuredRun], predictions: Sequence[Prediction]
) -> tuple[float, float]:
    """Returns the share of runs inside the interval, and the median ratio of the interval's
    ends.
    """
    ends = np.array([(each.low_s, each.high_s) for each in predictions])
    measured = np.array([run.measured_s for run in runs])
    inside = (ends[:, 0] <= measured) & (measured <= ends[:, 1])
    return float(np.mean(inside)), float(np.median(ends[:, 1] / ends[:, 0]))


def fold_constants() -> Mapping[str, CalibratedConstants]:
    """Returns, for each family, the constants that were fitted without it."""
    document, covariances = constants_document(), constant_covariances()
    found = {}
    for family, values in document.get("folds", {}).items():
        entries = {
            name: {"value": values.get(name, entry["value"])}
            for name, entry in document["constants"].items()
        }
        found[family] = constants_from({"constants": entries}, covariances.get(family))
    return found


def validate_memory() -> list[MemoryComparison]:
    """Returns, for each run with published memory, the run and its predicted memory."""
    constants = default_constants()
    return [
        MemoryComparison(run=run, predicted_bytes=predict_run(run, constants).memory_bytes)
        for run in measured_runs()
        if run.memory_bytes is not None
    ]


def ranking(
    runs: Sequence[MeasuredRun], predicted_s: Sequence[float]
) -> tuple[float | None, float | None]:
    """Returns Kendall's tau (tau-a) and the mean regret over groups of runs.

    The runs of a group differ only in layout. A group has at least three runs of one model,
    cluster, sequence and batch. Without groups, both values are None.
    """
    pairs = list(zip(runs, predicted_s, strict=True))
    taus, regrets = [], []
    for _, group in _by_key(pairs, lambda pair: _job_key(pair[0])):
        if len(group) < 3:
            continue
        measured = np.array([run.measured_s for run, _ in group])
        predicted = np.array([seconds for _, seconds in group])
        upper = np.triu_indices(len(group), 1)
        signs = np.sign(measured[:, None] - measured) * np.sign(predicted[:, None] - predicted)
        taus.append(float(np.mean(signs[upper])))
        regrets.append(float(measured[np.argmin(predicted)] / measured.min() - 1))
    if not taus:
        return None, None
    return float(np.mean(taus)), float(np.mean(regrets))


def _job_key(run: MeasuredRun) -> str:
    return repr((run.source, run.model, run.cluster, run.job.seq, run.job.global_batch, run.note))


def row_name(run: MeasuredRun) -> str:
    """Returns the name of the run's row in the table of errors."""
    if run.family != "Megatron-Bridge":
        return run.family
    return f"{run.family}, {'experts' if run.model.experts else 'dense'}"


def _by_key(items: Iterable[_Item], key: Callable[[_Item], str]) -> list[tuple[str, list[_Item]]]:
    """Groups items by key, in the order of their first members."""
    found: dict[str, list[_Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.items())


def errors_markdown(rows: Sequence[ErrorRow]) -> str:
    """Returns the errors as a table in Markdown, as in `docs/planner.md`."""
    lines = [
        "| source | runs | fitted | held out | with one run | worst | Kendall's tau | regret |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        tau = "-" if row.tau is None else f"{row.tau:.2f}"
        regret = "-" if row.regret is None else f"{row.regret:.1%}"
        known = "-" if row.one_run is None else f"{row.one_run:.1%}"
        shares = [f"{row.fitted:.1%}", f"{row.held_out:.1%}", known, f"{row.worst:.0%}"]
        lines.append(_line(row.family, str(row.runs), *shares, tau, regret))
    return "\n".join(lines)


def intervals_markdown(rows: Sequence[ErrorRow]) -> str:
    """Returns the intervals as a table in Markdown, as in `docs/planner.md`. The last two lines are
    the means over all runs and over all sources.
    """
    lines = [
        "| source | runs | bias | spread | held out: in the interval | width | "
        "with one run: in the interval | width | fitted: in the interval | width |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        own = ("-", "-")
        if row.one_run_covered is not None:
            own = (f"{row.one_run_covered:.0%}", f"{row.one_run_width:.2f}")
        biases = (f"{np.expm1(row.bias):+.0%}", f"{np.expm1(row.spread):.0%}")
        held = (f"{row.covered:.0%}", f"{row.width:.2f}")
        fitted = (f"{row.fitted_covered:.0%}", f"{row.fitted_width:.2f}")
        lines.append(_line(row.family, str(row.runs), *biases, *held, *own, *fitted))
    runs = [row.runs for row in rows]
    for name, weights in (("all runs", runs), ("mean of the sources", None)):
        held_out, fitted_too = (
            f"{np.average([getattr(row, name) for row in rows], weights=weights):.0%}"
            for name in ("covered", "fitted_covered")
        )
        count = str(sum(runs)) if weights else "-"
        lines.append(_line(name, count, "-", "-", held_out, "-", "-", "-", fitted_too, "-"))
    return "\n".join(lines)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('%', ' %') for cell in cells)} |"

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
    covered: float
    """Share of runs inside the 80 % interval, with held-out constants."""
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
    found = []
    given = measured_runs() if runs is None else runs
    for family, members in _by_key(given, _row_name):
        fold = fold_constants().get(members[0].family, default_constants())
        fitted = [predict_run(run, default_constants()) for run in members]
        held = [predict_run(run, fold) for run in members]
        measured = np.array([run.measured_s for run in members])
        errors = np.array([each.step_s for each in held]) / measured - 1
        inside = [
            each.low_s <= run.measured_s <= each.high_s
            for each, run in zip(held, members, strict=True)
        ]
        tau, regret = ranking(members, [each.step_s for each in held])
        known = one_run_errors(members, held, fold)
        fitted_errors = np.array([each.step_s for each in fitted]) / measured - 1
        found.append(
            ErrorRow(
                family=family,
                runs=len(members),
                fitted=float(np.mean(np.abs(fitted_errors))),
                held_out=float(np.mean(np.abs(errors))),
                worst=float(np.max(np.abs(errors))),
                covered=float(np.mean(inside)),
                tau=tau,
                regret=regret,
                one_run=None if known is None else known.error,
                one_run_covered=None if known is None else known.covered,
            )
        )
    return found


def fold_constants() -> Mapping[str, CalibratedConstants]:
    """Returns, for each family, the constants that were fitted without it."""
    document = constants_document()
    found = {}
    for family, values in document.get("folds", {}).items():
        entries = {
            name: {"value": values.get(name, entry["value"])}
            for name, entry in document["constants"].items()
        }
        found[family] = constants_from({"constants": entries})
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


def _row_name(run: MeasuredRun) -> str:
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
    """Returns the errors as a table in Markdown, as in `docs/planner.md`.

    >>> row = ErrorRow(family="a", runs=3, fitted=0.1, held_out=0.2, worst=0.5, covered=0.8,
    ...                tau=None, regret=None)
    >>> print(errors_markdown([row]).splitlines()[-1])
    | a | 3 | 10.0 % | 20.0 % | - | 50 % | 80 % | - | - |
    """
    lines = [
        "| source | runs | fitted | held out | with one run | worst | in the 80 % interval "
        "| Kendall's tau | regret |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        tau = "-" if row.tau is None else f"{row.tau:.2f}"
        regret = "-" if row.regret is None else f"{row.regret:.1%}"
        known = "-" if row.one_run is None else f"{row.one_run:.1%}"
        shares = [f"{row.fitted:.1%}", f"{row.held_out:.1%}", known, f"{row.worst:.0%}"]
        cells = [each.replace("%", " %") for each in (*shares, f"{row.covered:.0%}", tau, regret)]
        lines.append(f"| {row.family} | {row.runs} | {' | '.join(cells)} |")
    return "\n".join(lines)

"""Errors of the planner on published runs, by source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unisono.planner.constants.calibrated_constants import default_constants
from unisono.planner.prediction import Prediction
from unisono.planner.validation.ground_truth import MeasuredRun, measured_runs
from unisono.planner.validation.layout_ranking import ranking
from unisono.planner.validation.own_run_errors import OwnRunErrors, own_run_errors
from unisono.planner.validation.predicted_runs import (
    fold_constants,
    grouped,
    predict_run,
    row_name,
)

OWN_RUN_COUNTS = (1, 2, 3)


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
    own: tuple[OwnRunErrors, ...] = ()
    """Errors with held-out constants, after calibration with 1, 2 and 3 other runs of the source.
    Counts that no source of the family has are absent."""

    def with_own_runs(self, count: int) -> OwnRunErrors | None:
        """Returns the errors after calibration with `count` runs, or None if they are absent."""
        return next((each for each in self.own if each.runs == count), None)


def validate(runs: Sequence[MeasuredRun] | None = None) -> list[ErrorRow]:
    """Returns the errors by family. The default runs are all that the package ships.

    Mixtures of experts and dense models of one family are separate rows. Families that the
    constants were not fitted to have equal fitted and held-out errors.
    """
    given = measured_runs() if runs is None else runs
    return [_error_row(family, members) for family, members in grouped(given, row_name)]


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
    own = [own_run_errors(members, held, fold, count) for count in OWN_RUN_COUNTS]
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
        own=tuple(each for each in own if each is not None),
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

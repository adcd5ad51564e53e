"""The widths of the 80 % interval, from the errors of fitted and of held-out predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.planner.constants.calibrated_constants import QUANTILE_90, CalibratedConstants
from unisono.planner.prediction import deviation_shares
from unisono.planner.validation.ground_truth import MeasuredRun
from unisono.planner.validation.validation import predict_run

_COVERED = 0.82
"""Share of runs that the interval must cover, as a mean over families: a little over 80 %."""
_LARGEST = 0.5
"""Largest error that counts in the fit. A few runs have larger errors that the model cannot
explain."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class _Errors:
    """Errors of one family: for each run, the logarithm of predicted over measured time, and the
    squared factor of each cause of errors (`deviation_shares`).
    """

    shares: _Floats
    errors: _Floats


def interval_widths(
    runs: Sequence[MeasuredRun],
    fitted: CalibratedConstants,
    folds: Mapping[str, CalibratedConstants],
) -> dict[str, float]:
    """Returns the standard deviation of the error for each cause.

    Half of a family's weight is on errors with constants that were fitted to the family, and half
    on errors with constants that were fitted without it, because users predict runs of known and of
    new kinds. The deviations are fitted to squared errors by non-negative least squares. Then one
    factor scales all deviations, so that the interval holds 82 % of the runs.
    """
    names = list(fitted.sigma)
    parts = []
    for family in dict.fromkeys(run.family for run in runs):
        members = [run for run in runs if run.family == family]
        for constants in (fitted, folds.get(family, fitted)):
            parts.append(_errors(members, constants, names))
    shares = np.concatenate([part.shares / len(part.errors) for part in parts])
    targets = np.concatenate(
        [np.minimum(part.errors**2, _LARGEST**2) / len(part.errors) for part in parts]
    )
    variances = _none_negative(shares, targets)
    factor = _scale(parts, variances)
    given = np.any(shares > 0, axis=0)
    return {
        name: float(factor * np.sqrt(variance)) if known else fitted.sigma[name]
        for name, variance, known in zip(names, variances, given, strict=True)
    }


def _errors(
    runs: Sequence[MeasuredRun], constants: CalibratedConstants, names: Sequence[str]
) -> _Errors:
    shares, errors = [], []
    for run in runs:
        found = predict_run(run, constants)
        causes: Mapping[str, Any] = deviation_shares(
            run.model, run.cluster, run.job, found.time, found.step_s
        )
        shares.append([causes[name] ** 2 for name in names])
        errors.append(np.log(found.step_s / run.measured_s))
    return _Errors(shares=np.array(shares, np.float64), errors=np.array(errors, np.float64))


def _none_negative(shares: _Floats, targets: _Floats) -> _Floats:
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    variances: _Floats = nnls(shares, targets)[0]
    return variances


def _scale(parts: Sequence[_Errors], variances: _Floats) -> float:
    """Returns the factor by which to multiply all deviations, so that the interval holds the wanted
    share of the runs.
    """
    low, high = 0.1, 10.0
    for _ in range(40):
        factor = np.sqrt(low * high)
        covered = [
            np.mean(np.abs(part.errors) <= QUANTILE_90 * factor * np.sqrt(part.shares @ variances))
            for part in parts
        ]
        low, high = (low, factor) if np.mean(covered) > _COVERED else (factor, high)
    return float(np.sqrt(low * high))

"""The standard deviation of the part of errors that all runs of a source share, over all sources.

The fit of constants takes up a part of the errors of its own sources, and these sources are few. So
this standard deviation is fitted to the errors of new sources: of the runs that only judge the
planner, with the shipped constants, and of the families of the fit, with the constants that were
fitted without them. It maximises the likelihood of the distribution of errors that predictions use
(`ErrorDistribution`). No prediction of a step time depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from unisono.planner.calibration.error_components import ErrorGroups
from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.constants.error_distribution import error_scales
from unisono.planner.validation.ground_truth import MeasuredRun, measured_runs
from unisono.planner.validation.judged_runs import judged_runs
from unisono.planner.validation.predicted_runs import grouped, predict_run

_LARGEST_SOURCE = 150
"""Largest number of runs of a source that count."""
_SMALLEST, _LARGEST, _STEPS = 0.01, 1.0, 185
"""Limits and number of the standard deviations to try; two neighbours differ by 2.5 %."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class SourceErrors:
    """The likelihood of the errors of one source, as a function of the source's part.

    `spreads` are the covariances of the errors [scales, runs, runs] without the source's part, for
    each of `error_scales`.
    """

    name: str
    log_determinants: _Floats
    fits: _Floats
    """Errors times inverse covariance times errors [scales]."""
    sums: _Floats
    """Sums of inverse covariance times errors [scales]."""
    weights: _Floats
    """Sums of the inverse covariance [scales]."""

    @classmethod
    def of(cls, name: str, errors: _Floats, spreads: _Floats) -> SourceErrors:
        """Returns the likelihood of errors [runs] with covariances [scales, runs, runs]."""
        ones = np.ones(len(errors))
        right = np.stack([errors, ones], axis=1)
        solved = np.linalg.solve(spreads, np.broadcast_to(right, (len(spreads), *right.shape)))
        return cls(
            name=name,
            log_determinants=np.linalg.slogdet(spreads)[1],
            fits=solved[:, :, 0] @ errors,
            sums=solved[:, :, 0] @ ones,
            weights=solved[:, :, 1] @ ones,
        )

    def log_likelihood(self, sigma: float) -> float:
        """Returns the logarithm of the likelihood, up to a constant, if `sigma` is the standard
        deviation of the source's part.
        """
        scales = error_scales()
        variances = np.array([(sigma * each.source) ** 2 for each in scales])
        # A part that all errors share adds a matrix of rank one (Sherman and Morrison).
        grown = 1 + variances * self.weights
        misfit = self.fits - variances * self.sums**2 / grown
        logs = np.log([each.weight for each in scales])
        logs = logs - (self.log_determinants + np.log(grown) + misfit) / 2
        return float(logs.max() + np.log(np.sum(np.exp(logs - logs.max()))))


def source_errors(
    every: CalibratedConstants, folds: Mapping[str, CalibratedConstants]
) -> list[SourceErrors]:
    """Returns the errors of all sources: of judged runs with the constants `every`, and of each
    family with the constants of its fold. The names of judged sources and families are distinct.
    """
    found = [
        _source(source, members, every)
        for source, members in grouped(judged_runs(), lambda run: run.source)
    ]
    for family, members in grouped(measured_runs(), lambda run: run.family):
        step = -(-len(members) // _LARGEST_SOURCE)
        found.append(_source(family, members[::step], folds[family]))
    return found


def _source(name: str, runs: Sequence[MeasuredRun], constants: CalibratedConstants) -> SourceErrors:
    steps = [predict_run(run, constants) for run in runs]
    pairs = zip(runs, steps, strict=True)
    errors = np.array([log(run.measured_s / step.step_s) for run, step in pairs])
    parts = np.array([step.derivatives for step in steps]) @ constants.covariance.matrix()
    groups, one = ErrorGroups(runs), np.ones(1)
    fixed = parts @ parts.T
    for part in groups.names:
        if part not in ("source", "run"):
            fixed = fixed + groups.part(part, constants.sigma[part], one)
    single = constants.sigma["run"] ** 2 * np.eye(len(runs))
    spreads = np.array([fixed + each.run**2 * single for each in error_scales()])
    return SourceErrors.of(name, errors, spreads)


def fit_source_spread(sources: Sequence[SourceErrors]) -> float:
    """Returns the most likely standard deviation of the source's part."""
    tried = [
        exp(log(_SMALLEST) + i / (_STEPS - 1) * log(_LARGEST / _SMALLEST)) for i in range(_STEPS)
    ]
    return max(tried, key=lambda sigma: sum(each.log_likelihood(sigma) for each in sources))

"""The parts of the errors of predictions that runs have in common, and the fit of these parts.

Errors within one source are correlated: all its runs share the software, the machine and the way to
measure, and some share the model or the work of each device. The errors of n runs are a mixed
linear model (Henderson, Biometrics 31, 1975): derivatives times the deviations of the constants
from their priors, plus an effect of each source, model and work, plus the error of the single run.
The standard deviations of all parts maximise the marginal likelihood.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from unisono.planner.constants.run_similarity import similarity
from unisono.planner.prediction_error import error_causes
from unisono.planner.validation.ground_truth import MeasuredRun

BASE = ("source", "model", "work", "run")
"""The parts of each error, from the one that most runs share to the one that no runs share."""
_SIGMA_WIDTH = 0.75
"""Standard deviation of the logarithm of a part's deviation around its prior."""
_LARGEST = 0.5
"""Largest error that counts in the fit. A few runs have larger errors that the model cannot
explain."""

_Floats = NDArray[np.float64]


class ErrorGroups:
    """The groups of runs whose errors have a part in common."""

    def __init__(self, runs: Sequence[MeasuredRun]) -> None:
        keys = [_keys(run) for run in runs]
        self._same = {
            name: _equal([key[: depth + 1] for key in keys]) for depth, name in enumerate(BASE[:-1])
        }
        causes = [error_causes(run.model, run.cluster, run.job) for run in runs]
        extra = {name for each in causes for name in each} - set(BASE)
        self.extra = {name: np.array([name in each for each in causes], float) for name in extra}
        self._count = len(runs)

    def covariance(self, sigma: Mapping[str, float]) -> _Floats:
        """Returns the covariance [runs, runs] of the errors, without the part of wrong constants.

        The error of a cause that only some runs have, such as experts, is half common to a model in
        a source, and half of the single run.
        """
        alone = np.eye(self._count)
        found: _Floats = sigma["run"] ** 2 * alone
        for name, same in self._same.items():
            found += sigma[name] ** 2 * same
        for name, given in self.extra.items():
            both = (self._same["model"] + alone) / 2 * np.outer(given, given)
            found += sigma[name] ** 2 * both
        return found


def _keys(run: MeasuredRun) -> tuple[Hashable, ...]:
    like = similarity(run.model, run.cluster, run.layout, run.job)
    return run.family, (like.machine, like.model), like.work


def _equal(keys: Sequence[Hashable]) -> _Floats:
    numbers: dict[Hashable, int] = {}
    groups = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
    same: _Floats = (groups[:, None] == groups).astype(np.float64)
    return same


def fit_sigma(
    groups: ErrorGroups,
    errors: _Floats,
    gradients: _Floats,
    offsets: _Floats,
    widths: _Floats,
    priors: Mapping[str, float],
) -> dict[str, float]:
    """Returns the standard deviation of each part of the errors.

    `errors` [runs] are logarithms of measured over predicted time. `gradients` [runs, constants]
    are the derivatives of the logarithm of the predicted time by those of the constants. `offsets`
    [constants] are the logarithms of the constants over their priors, and `widths` [constants] the
    standard deviations of the priors. A part that no run has keeps its value in `priors`. Raises
    ImportError without SciPy.
    """
    from scipy.linalg import cho_factor, cho_solve  # type: ignore[import-untyped]
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    names = [*BASE, *sorted(groups.extra)]
    away = np.clip(errors, -_LARGEST, _LARGEST) + gradients @ offsets
    of_constants = (gradients * widths**2) @ gradients.T

    def cost(logs: _Floats) -> float:
        sigma = {name: priors[name] * float(np.exp(x)) for name, x in zip(names, logs, strict=True)}
        factor = cho_factor(groups.covariance(sigma) + of_constants, lower=True)
        likelihood = away @ cho_solve(factor, away) / 2 + np.sum(np.log(np.diag(factor[0])))
        return float(likelihood + np.sum((logs / _SIGMA_WIDTH) ** 2) / 2)

    # Up to four widths from the prior, the covariance is far from singular.
    limits = [(-4 * _SIGMA_WIDTH, 4 * _SIGMA_WIDTH)] * len(names)
    start = np.zeros(len(names))
    found = minimize(cost, start, method="L-BFGS-B", bounds=limits, options={"maxiter": 40})
    moved = {name: priors[name] * float(np.exp(x)) for name, x in zip(names, found.x, strict=True)}
    return {**priors, **moved}


def constants_factor(covariance: _Floats, gradients: _Floats, widths: _Floats) -> _Floats:
    """Returns the lower triangular factor [constants, constants] of the covariance of the
    constants' logarithms, after the fit to runs whose errors have this covariance [runs, runs].

    `gradients` [runs, constants] and `widths` [constants] are those of `fit_sigma`.
    """
    information = gradients.T @ np.linalg.solve(covariance, gradients) + np.diag(widths**-2)
    factor: _Floats = np.linalg.cholesky(np.linalg.inv(information))
    return factor


def central_quantile(errors: Sequence[float], groups: Sequence[str], share: float) -> float:
    """Returns the smallest size that at least `share` of the errors do not exceed, both if each
    error has the same weight and if each group has the same weight.

    `groups`: the group of each error.
    """
    sizes = np.abs(errors)
    order = np.argsort(sizes)
    counts = np.array([1 / groups.count(group) for group in groups])
    found = 0.0
    for weights in (np.ones(len(sizes)), counts):
        reached = np.cumsum(weights[order]) / weights.sum()
        found = max(found, float(sizes[order][np.searchsorted(reached, share - 1e-9)]))
    return found

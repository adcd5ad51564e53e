"""The parts of the errors of predictions that runs have in common, and the fit of these parts.

Errors within one source are correlated: all its runs share the software, the machine and the way to
measure, and some share the model or the work of each device. The errors of n runs are a mixed
linear model (Henderson, Biometrics 31, 1975): derivatives times the deviations of the constants
from their priors, plus an effect of each source, model and work, plus the error of the single run.
The single run's error has a scale in each source, because some sources repeat a step within 1 %,
and others change settings that the planner does not know. The standard deviations of all parts and
the scales maximise the marginal likelihood.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.planner.constants.run_similarity import EVERY_RUN, similarity
from unisono.planner.validation.ground_truth import MeasuredRun

_SIGMA_WIDTH = 0.75
"""Standard deviation of the logarithm of a part's deviation around its prior."""
_LARGEST = 0.5
"""Largest error that counts in the fit. A few runs have larger errors that the model cannot
explain."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ErrorParts:
    """The fitted parts of the errors."""

    sigma: Mapping[str, float]
    """Standard deviation of each part."""
    run_scales: _Floats
    """Scale [sources] of the single run's part, in the order of `ErrorGroups.sources`."""


class ErrorGroups:
    """The groups of runs whose errors have a part in common."""

    def __init__(self, runs: Sequence[MeasuredRun]) -> None:
        likes = [similarity(run.model, run.cluster, run.layout, run.job) for run in runs]
        families = [run.family for run in runs]
        self.sources = tuple(dict.fromkeys(families))
        self._source = np.array([self.sources.index(family) for family in families])
        keys = [
            (family, (like.machine, like.model), like.work)
            for family, like in zip(families, likes, strict=True)
        ]
        same = [_equal([key[: depth + 1] for key in keys]) for depth in range(3)]
        self._same = dict(zip(EVERY_RUN, [*same, np.eye(len(runs))], strict=True))
        extra = {name for like in likes for name in like.causes} - set(EVERY_RUN)
        for name in sorted(extra):
            given = np.array([name in like.causes for like in likes], float)
            if name == "experts":
                common = (self._same["model"] + self._same["run"]) / 2
            else:
                common = self._same["work"]
            self._same[name] = np.outer(given, given) * common

    @property
    def names(self) -> tuple[str, ...]:
        """The parts that these runs have."""
        return tuple(self._same)

    def part(self, name: str, sigma: float, run_scales: _Floats) -> _Floats:
        """Returns the covariance [runs, runs] that a part of the errors causes.

        Experts cause an error that is half common to a model in a source, and half of the single
        run. Each other cause that only some runs have is common to equal work in a source.
        """
        found: _Floats = sigma**2 * self._same[name]
        return found * run_scales[self._source] ** 2 if name == "run" else found

    def covariance(self, parts: ErrorParts) -> _Floats:
        """Returns the covariance [runs, runs] of the errors, without the part of wrong
        constants.
        """
        each = [self.part(name, parts.sigma[name], parts.run_scales) for name in self._same]
        found: _Floats = np.sum(each, axis=0)
        return found

    def by_source(self, values: _Floats) -> _Floats:
        """Returns the sums [sources] of values [runs]."""
        found = np.bincount(self._source, values, minlength=len(self.sources))
        return found.astype(np.float64)


def _equal(keys: Sequence[Hashable]) -> _Floats:
    numbers: dict[Hashable, int] = {}
    groups = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
    same: _Floats = (groups[:, None] == groups).astype(np.float64)
    return same


class ErrorLikelihood:
    """The marginal likelihood of the errors of runs, as a function of the errors' parts.

    `errors` [runs] are logarithms of measured over predicted time. `gradients` [runs, constants]
    are the derivatives of the logarithm of the predicted time by those of the constants. `offsets`
    [constants] are the logarithms of the constants over their priors, and `widths` [constants] the
    standard deviations of the priors. `priors` are those of the errors' parts. Needs SciPy.
    """

    def __init__(
        self,
        groups: ErrorGroups,
        errors: _Floats,
        gradients: _Floats,
        offsets: _Floats,
        widths: _Floats,
        priors: Mapping[str, float],
    ) -> None:
        self._groups, self._priors = groups, priors
        self._away = np.clip(errors, -_LARGEST, _LARGEST) + gradients @ offsets
        self._of_constants = (gradients * widths**2) @ gradients.T

    def parts(self, logs: _Floats) -> ErrorParts:
        """Returns the parts whose logarithms over their priors are `logs`: first those of the
        standard deviations, in the order of `ErrorGroups.names`, then those of the scales. A part
        that no run has keeps its prior.
        """
        names = self._groups.names
        pairs = zip(names, logs[: len(names)], strict=True)
        moved = {name: self._priors[name] * float(np.exp(x)) for name, x in pairs}
        return ErrorParts(sigma={**self._priors, **moved}, run_scales=np.exp(logs[len(names) :]))

    def cost(self, logs: _Floats) -> tuple[float, _Floats]:
        """Returns the negative logarithm of the likelihood and of the priors' density, up to a
        constant, and its derivatives by `logs`.
        """
        from scipy.linalg import cho_factor, cho_solve  # type: ignore[import-untyped]

        parts, names = self.parts(logs), self._groups.names
        each = [self._groups.part(name, parts.sigma[name], parts.run_scales) for name in names]
        factor = cho_factor(np.sum(each, axis=0) + self._of_constants, lower=True)
        fitted = cho_solve(factor, self._away)
        likelihood = self._away @ fitted / 2 + np.sum(np.log(np.diag(factor[0])))
        slope = cho_solve(factor, np.eye(len(fitted))) - np.outer(fitted, fitted)
        of_sigma = [np.sum(slope * part) for part in each]
        of_scales = self._groups.by_source(np.diag(slope * each[names.index("run")]))
        widths = np.repeat([_SIGMA_WIDTH, 1.0], [len(names), len(of_scales)])
        slopes = np.concatenate([of_sigma, of_scales]) + logs / widths**2
        return float(likelihood + np.sum((logs / widths) ** 2) / 2), slopes


def fit_parts(likelihood: ErrorLikelihood, groups: ErrorGroups) -> ErrorParts:
    """Returns the most likely parts of the errors. Raises ImportError without SciPy."""
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    # Up to four widths from the prior, the covariance is far from singular.
    limits = [(-4 * _SIGMA_WIDTH, 4 * _SIGMA_WIDTH)] * len(groups.names)
    limits += [(-4.0, 4.0)] * len(groups.sources)
    start = np.zeros(len(limits))
    options = {"maxiter": 100}
    found = minimize(
        likelihood.cost, start, jac=True, method="L-BFGS-B", bounds=limits, options=options
    )
    return likelihood.parts(found.x)


def constants_factor(covariance: _Floats, gradients: _Floats, widths: _Floats) -> _Floats:
    """Returns the lower triangular factor [constants, constants] of the covariance of the
    constants' logarithms, after the fit to runs whose errors have this covariance [runs, runs].

    `gradients` [runs, constants] and `widths` [constants] are those of `ErrorLikelihood`.
    """
    information = gradients.T @ np.linalg.solve(covariance, gradients) + np.diag(widths**-2)
    factor: _Floats = np.linalg.cholesky(np.linalg.inv(information))
    return factor

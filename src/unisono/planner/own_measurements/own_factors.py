"""The factors of times that the user's own runs show.

Each part of an error (`prediction_error`) is normally distributed before the own runs. The errors
of the own runs are sums of the parts, and of the error of the single run. So the parts have a
normal distribution after the own runs too: its means are the ridge estimate (Hoerl and Kennard,
Technometrics 12, 1970), which shrinks towards no change. The means give one factor for each group
of kinds of time, and the covariance gives the interval. A single run may be an exception, and so
may the user's machine. So the error of the single run, and the part that all runs share, have
Student's distribution, whose estimate is found by repeated reweighting (Lange, Little and Taylor,
JASA 84, 1989). Own runs that scatter more than those of published sources make the interval wider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, sqrt

import numpy as np

from unisono.planner.constants.prediction_error import PARTS, PROPERTIES, ErrorCauses, Floats
from unisono.planner.own_measurements.calibration import OwnRun

_FREEDOM = 3.0
"""Degrees of freedom of the error of a single run, and of the part of all runs."""
_ROUNDS = 20


class OwnFactors:
    """The conclusions from own runs with one device and software about other runs with both.

    `sigma` has the standard deviations of the parts of errors. Without runs, all factors are 1.
    """

    def __init__(self, runs: Sequence[OwnRun], sigma: Mapping[str, float]) -> None:
        self.runs, self._sigma = tuple(runs), sigma
        variances = np.array([sigma[name] ** 2 for name in PARTS])
        weights = np.array([run.causes.weights() for run in runs]).reshape(len(runs), len(PARTS))
        errors = np.array([run.error for run in runs])
        known = np.array([run.causes.single_variance(sigma) for run in runs])
        single, rest = known, errors
        self._means, self._covariance = np.zeros(len(PARTS)), np.diag(variances)
        for _ in range(_ROUNDS if len(runs) else 0):
            common = weights * variances  # [runs, parts]
            gain = np.linalg.solve(common @ weights.T + np.diag(single), common).T
            self._means, self._covariance = gain @ errors, np.diag(variances) - gain @ common
            rest = errors - weights @ self._means
            single = _variance(known, rest)
            variances[0] = _variance(np.square(sigma["source"]), self._means[0])
        # own runs that scatter more or less than those of published sources
        self._scatter = (_FREEDOM + np.sum(rest**2 / known)) / (_FREEDOM + len(runs))

    def factors(self, properties: tuple[str, ...]) -> Mapping[str, float]:
        """Returns the factor of each group of kinds of time, for runs with these properties.

        >>> from unisono.planner.constants.calibrated_constants import default_constants
        >>> OwnFactors((), default_constants().sigma).factors(())
        {'compute': 1.0, 'exchange': 1.0, 'host': 1.0}
        """
        part = dict(zip(PARTS, map(float, self._means), strict=True))
        common = part["source"] + sum(part[name] for name in PROPERTIES if name in properties)
        return {
            "compute": exp(common),
            "exchange": exp(common) * _factor(part["exchange"]),
            "host": exp(common) * _factor(part["host"]),
        }

    def deviation(self, causes: ErrorCauses) -> float:
        """Returns the standard deviation of the error of another run, after the factors."""
        weights = causes.weights()
        return sqrt(float(weights @ self._covariance @ weights + self._single(causes)))

    def _single(self, causes: ErrorCauses) -> float:
        return float(self._scatter * causes.single_variance(self._sigma))

    def ratio_deviation(self, causes: ErrorCauses, others: ErrorCauses) -> float:
        """Returns the standard deviation of the error of the ratio of two runs with the same device
        and software. The runs share the error of the source, and those of exchanges and of the host
        as far as their shares agree.
        """
        weights = causes.weights() - others.weights()
        both = self._single(causes) + self._single(others)
        return sqrt(float(weights @ self._covariance @ weights + both))


def _variance(known: Floats, error: Floats) -> Floats:
    """Returns the variance with which a normal distribution weighs an error as Student's does."""
    found: Floats = (_FREEDOM * known + np.square(error)) / (_FREEDOM + 1)
    return found


def _factor(part: float) -> float:
    """Returns the factor of a group's time from its part of the error.

    The part was weighted with the group's share of the time. So a longer time is linear in it.
    """
    return 1 + part if part > 0 else exp(part)

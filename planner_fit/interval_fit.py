"""The standard deviations of the parts of errors (`prediction_error`), fitted to errors on sources
that were left out.

The errors of one source are normally distributed with the covariance that the parts cause. The
standard deviations maximise the likelihood of all sources and a weak prior. Errors have heavier
tails than a normal distribution, so the result is multiplied by the factor with which the intervals
hold `COVERED` of the runs, as a mean over the sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.planner.constants.prediction_error import NORMAL_80, PARTS

COVERED = 0.82
"""Share of the runs that the intervals hold: a little over 80 %."""
_PRIORS = {
    "source": 0.1,
    "exchange": 0.2,
    "host": 0.5,
    "experts": 0.15,
    "low precision": 0.05,
    "other device": 0.15,
    "not stated": 0.06,
    "run": 0.08,
    "expert run": 0.15,
}
_EXPERTS = PARTS.index("experts")
_PRIOR_WIDTH = 0.4
"""Standard deviation of the logarithm of a part around its prior."""
_LARGEST = 0.5
"""Largest error that counts in the likelihood."""
_STEPS = (0.4, 0.1, 0.025)
"""Changes of a part's logarithm to try, one after another."""

_Floats = NDArray[np.float64]


class SourceErrors(NamedTuple):
    """Errors of a source: logarithms of measured over predicted times [runs], and the weights
    [runs, parts] of `PARTS` in them.
    """

    name: str
    errors: _Floats
    weights: _Floats


def fit_parts(
    sources: Sequence[SourceErrors], start: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Returns the standard deviation of each part, of the single run ("run"), and of a
    further part of a single run with experts ("expert run")."""
    priors = np.log(list(_PRIORS.values()))
    logs = priors.copy() if start is None else np.log([start[name] for name in _PRIORS])
    best = _cost(logs, priors, sources)
    for size in _STEPS:
        better = True
        while better:
            better = False
            for i in range(len(logs)):
                for change in (size, -size):
                    tried = logs.copy()
                    tried[i] += change
                    cost = _cost(tried, priors, sources)
                    if cost < best - 1e-6:
                        logs, best, better = tried, cost, True
    sigma = np.exp(logs)
    return dict(zip(_PRIORS, map(float, sigma * _scale(sigma, sources)), strict=True))


def _cost(logs: _Floats, priors: _Floats, sources: Sequence[SourceErrors]) -> float:
    """Returns the negative logarithm of the likelihood and of the priors, up to a constant."""
    variances = np.exp(2 * logs)
    found = float(np.sum(((logs - priors) / _PRIOR_WIDTH) ** 2)) / 2
    for _, errors, weights in sources:
        covariance = (weights * variances[:-2]) @ weights.T + np.diag(_single(variances, weights))
        factor = np.linalg.cholesky(covariance)
        away = np.linalg.solve(factor, np.clip(errors, -_LARGEST, _LARGEST))
        found += float(away @ away) / 2 + float(np.sum(np.log(np.diag(factor))))
    return found


def _single(variances: _Floats, weights: _Floats) -> _Floats:
    """Returns the variance of the part of each single run: larger for runs with experts."""
    return variances[-2] + variances[-1] * weights[:, _EXPERTS]


def _scale(sigma: _Floats, sources: Sequence[SourceErrors]) -> float:
    """Returns the factor of all parts with which the intervals hold `COVERED` of the runs."""
    assert len(sigma) == len(PARTS) + 2
    sizes, shares = [], []
    for _, errors, weights in sources:
        shared = np.sum((weights * sigma[:-2]) ** 2, axis=1)
        sizes += list(np.abs(errors) / np.sqrt(shared + _single(sigma**2, weights)))
        shares += [1 / len(errors)] * len(errors)
    return weighted_quantile(np.array(sizes), np.array(shares), COVERED) / NORMAL_80


def weighted_quantile(values: _Floats, weights: _Floats, share: float) -> float:
    """Returns the smallest of `values` that at least `share` of all values, by weight, do not
    exceed.

    >>> weighted_quantile(np.array([0.1, 0.4, 0.2]), np.array([1, 1, 2]), 0.75)
    0.2
    """
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order[np.searchsorted(reached, share - 1e-9)]])

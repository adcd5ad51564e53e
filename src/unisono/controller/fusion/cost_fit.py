"""A fit of the latency and of the time per byte to the measured times of buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.controller.fusion.fusion_times import LinkCost

# The largest bucket of a fit must have at least this many times the bytes of the smallest bucket.
_SPAN = 2.0
# A time is an outlier if its error exceeds this many times the median error. If errors are normally
# distributed, this limit is 3 standard deviations.
_OUTLIER = 3 * 1.4826

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFit:
    """A fitted cost, and the quality of the fit."""

    cost: LinkCost
    r2: float
    residual: float
    """Median relative error of the fitted times."""


def fit_cost(nbytes: Sequence[float], times_s: Sequence[float]) -> CostFit | None:
    """Fits a latency and a time per byte to the times of buckets.

    Minimises the squared relative errors of all times, and then, in a second fit, of all times
    except the outliers of the first fit. Negative values become 0. Returns None if the times are
    not positive, or if the largest bucket has less than twice the bytes of the smallest, because
    the latency is then not distinguishable from the time per byte.

    >>> found = fit_cost([1e3, 1e4, 1e5], [1.1e-5, 2e-5, 1.1e-4])
    >>> round(found.cost.latency_s * 1e6, 3), round(found.cost.s_per_byte * 1e9, 3)
    (10.0, 1.0)
    >>> fit_cost([1e3, 1.5e3], [1e-5, 2e-5]) is None
    True
    """
    x, y = np.asarray(nbytes, float), np.asarray(times_s, float)
    if len(x) < 2 or not (y > 0).all() or x.max() < _SPAN * max(1.0, x.min()):
        return None
    cost = _line(x, y)
    errors = np.abs(cost.latency_s + cost.s_per_byte * x - y) / y
    usual = errors <= np.median(errors) * _OUTLIER
    if usual.sum() >= 2 and x[usual].max() >= _SPAN * max(1.0, x[usual].min()):
        cost = _line(x[usual], y[usual])
    fitted = cost.latency_s + cost.s_per_byte * x
    spread = float(((y - y.mean()) ** 2).sum())
    left = float(((y - fitted) ** 2).sum())
    return CostFit(
        cost=cost,
        r2=1.0 - left / spread if spread > 0 else 0.0,
        residual=float(np.median(np.abs(fitted - y) / y)),
    )


def _line(x: Floats, y: Floats) -> LinkCost:
    latency_s, s_per_byte = np.polynomial.polynomial.polyfit(x, y, 1, w=1 / y)
    if s_per_byte < 0:
        latency_s, s_per_byte = np.median(y), 0.0
    elif latency_s < 0:
        some = x > 0
        latency_s, s_per_byte = 0.0, np.median(y[some] / x[some])
    return LinkCost(latency_s=float(latency_s), s_per_byte=float(s_per_byte))

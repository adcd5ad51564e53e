"""The distribution of the logarithm of measured over predicted time.

The error of a single run differs more between runs of one source than between runs of another: some
sources repeat a step within 1 %, others change settings that the planner does not know, such as the
compiler. So the standard deviation of this part is itself uncertain: it is `sigma["run"]` times a
scale, whose logarithm has the standard normal distribution. A user's machine may also differ from
all machines of published runs, for example by a slow network. So the part of the source has a large
scale with a small probability. This probability is stated, not fitted: the errors of all published
sources are about equally likely with probabilities between 0.01 and 0.2. The distribution of an
error is a mixture of normal distributions, one for each pair of scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import erf, exp, pi, sqrt
from typing import NamedTuple

_RUN_ENDS = 2.5
_RUN_STEP = 0.5
UNUSUAL_SOURCE = 5.0
"""Scale of the source's part for an unusual machine."""
_UNUSUAL = 0.01
"""Probability of an unusual machine."""
_TOLERANCE = 1e-6


class ErrorScale(NamedTuple):
    """Scales of two parts of the errors in one source, and their probability."""

    source: float
    run: float
    weight: float


@cache
def error_scales() -> tuple[ErrorScale, ...]:
    """Returns the pairs of scales, with the probabilities that they have without runs of the
    source: first those of usual sources, then as many of unusual ones.

    >>> round(sum(each.weight for each in error_scales()), 9)
    1.0
    """
    logs = [i * _RUN_STEP - _RUN_ENDS for i in range(round(2 * _RUN_ENDS / _RUN_STEP) + 1)]
    density = [exp(-(x**2) / 2) for x in logs]
    return tuple(
        ErrorScale(source, exp(x), probability * each / sum(density))
        for source, probability in ((1.0, 1 - _UNUSUAL), (UNUSUAL_SOURCE, _UNUSUAL))
        for x, each in zip(logs, density, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class ErrorDistribution:
    """A mixture of normal distributions of the logarithm of measured over predicted time.

    >>> normal = ErrorDistribution(weights=(1.0,), means=(0.0,), deviations=(0.1,))
    >>> round(normal.half_width(1.2816), 5), round(normal.within(0.12816), 3)
    (0.12816, 0.8)
    """

    weights: Sequence[float]
    means: Sequence[float]
    """Mean of each part; the mean of the mixture is 0."""
    deviations: Sequence[float]

    def within(self, size: float) -> float:
        """Returns the probability that the error is between -`size` and `size`."""
        return self._within(size)[0]

    def _within(self, size: float) -> tuple[float, float]:
        """Returns the probability and its derivative by `size`."""
        found = density = 0.0
        parts = zip(self.weights, self.means, self.deviations, strict=True)
        for weight, mean, deviation in parts:
            width = sqrt(2) * deviation
            left, right = (size + mean) / width, (size - mean) / width
            found += weight * (erf(left) + erf(right)) / 2
            density += weight * (exp(-left * left) + exp(-right * right)) / (width * sqrt(pi))
        return found, density

    def half_width(self, quantile: float) -> float:
        """Returns the size that is exceeded as rarely as `quantile` standard deviations of a normal
        distribution.
        """
        wanted = erf(quantile / sqrt(2))
        parts = zip(self.weights, self.means, self.deviations, strict=True)
        size = quantile * sum(weight * (abs(mean) + each) for weight, mean, each in parts)
        low, high = 0.0, quantile * max(self.deviations) + max(map(abs, self.means))
        while high - low > _TOLERANCE * high:
            found, density = self._within(size)
            if abs(found - wanted) < _TOLERANCE:
                break
            low, high = (size, high) if found < wanted else (low, size)
            newton = size + (wanted - found) / density if density else low
            size = newton if low < newton < high else (low + high) / 2
        return size


def blind_distribution(variance: float, source: float, run: float) -> ErrorDistribution:
    """Returns the distribution without runs of the same source.

    `variance` is the variance of all other parts than the source's and the single run's, whose
    standard deviations at the scale 1 are `source` and `run`.
    """
    scales = error_scales()
    variances = [variance + (source * s) ** 2 + (run * r) ** 2 for s, r, _ in scales]
    return ErrorDistribution(
        weights=[each.weight for each in scales],
        means=[0.0] * len(scales),
        deviations=[sqrt(each) for each in variances],
    )

"""The standard deviation of the part of errors that all runs of a source share."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from unisono.planner.calibration.source_spread import SourceErrors, fit_source_spread
from unisono.planner.constants.error_distribution import error_scales

SCALES = error_scales()


def spreads(runs: int, run: float) -> np.ndarray:
    """Returns covariances [scales, runs, runs]: a part of wrong constants, and the single run."""
    lines = np.linspace(0.0, 0.1, runs)
    fixed = np.outer(lines, lines) + 0.001 * np.eye(runs)
    return np.array([fixed + (each.run * run) ** 2 * np.eye(runs) for each in SCALES])


@pytest.mark.parametrize("runs", [1, 4])
def test_likelihood_is_that_of_the_mixture(runs: int) -> None:
    """Compares with SciPy's density of each normal distribution of the mixture."""
    errors = np.random.default_rng(runs).normal(scale=0.1, size=runs)
    source = SourceErrors.of("source", errors, spreads(runs, 0.05))
    found = []
    for sigma in (0.03, 0.2):
        logs = [
            np.log(each.weight)
            + multivariate_normal.logpdf(errors, cov=cov + (sigma * each.source) ** 2)
            for each, cov in zip(SCALES, spreads(runs, 0.05), strict=True)
        ]
        whole = logsumexp(logs) + runs / 2 * np.log(2 * np.pi)
        assert source.log_likelihood(sigma) == pytest.approx(whole, rel=1e-9)
        found.append(whole)
    assert found[0] != pytest.approx(found[1])


def test_the_spread_of_many_sources_is_found() -> None:
    """Draws errors of 300 sources, whose shared part has a known standard deviation."""
    random, true, sources = np.random.default_rng(0), 0.12, []
    weights = [each.weight for each in SCALES]
    for number in range(300):
        scale = SCALES[random.choice(len(SCALES), p=weights)]
        covariance = spreads(5, 0.03)[SCALES.index(scale)] + (true * scale.source) ** 2
        errors = random.multivariate_normal(np.zeros(5), covariance)
        sources.append(SourceErrors.of(str(number), errors, spreads(5, 0.03)))
    assert fit_source_spread(sources) == pytest.approx(true, rel=0.12)

"""The parts of errors: hidden ones are found, and intervals hold the wanted share of runs."""

from __future__ import annotations

import numpy as np
import pytest
from interval_fit import COVERED, SourceErrors, fit_parts

from unisono.planner.constants.prediction_error import NORMAL_80, PARTS, ErrorCauses

HIDDEN = {
    **dict.fromkeys(PARTS, 0.0),
    "source": 0.15,
    "experts": 0.3,
    "run": 0.05,
    "expert run": 0.2,
}


def drawn_sources(count: int, seed: int) -> list[SourceErrors]:
    """Returns sources of 8 runs with the hidden parts; every second one has experts."""
    random, found = np.random.default_rng(seed), []
    for number in range(count):
        properties = ("experts",) if number % 2 else ()
        causes = [ErrorCauses(random.uniform(0, 0.4), 0.0, properties) for _ in range(8)]
        weights = np.array([each.weights() for each in causes])
        parts = random.normal(size=len(PARTS)) * [HIDDEN[name] for name in PARTS]
        single = [each.single_variance(HIDDEN) ** 0.5 for each in causes]
        errors = weights @ parts + random.normal(0, single)
        found.append(SourceErrors(str(number), errors, weights))
    return found


def test_hidden_parts_are_found() -> None:
    found = fit_parts(drawn_sources(200, 1))
    for name in ("source", "experts", "run", "expert run"):
        assert found[name] == pytest.approx(HIDDEN[name], rel=0.25), name


def test_intervals_hold_other_sources() -> None:
    sigma = fit_parts(drawn_sources(300, 1))
    parts = np.array([sigma[name] for name in PARTS])
    inside = []
    for _, errors, weights in drawn_sources(400, 2):
        more = sigma["expert run"] ** 2 * weights[:, PARTS.index("experts")]
        single = sigma["run"] ** 2 + more
        deviations = np.sqrt(np.sum((weights * parts) ** 2, axis=1) + single)
        inside += list(np.abs(errors) < NORMAL_80 * deviations)
    assert np.mean(inside) == pytest.approx(COVERED, abs=0.05)

"""The order of layouts: closed forms of Kendall's tau, its limit, and the table of the docs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from unisono import planner

BASE = next(run for run in planner.measured_runs() if run.family == "vTrain multi")


def runs(*seconds: float) -> list[planner.MeasuredRun]:
    return [replace(BASE, measured_s=each) for each in seconds]


def test_pairs_without_an_order_do_not_count() -> None:
    """Tests three pairs: one of equal measured times, one right and one wrong."""
    [group] = planner.ranked_groups(runs(1.0, 1.0, 2.0), [1.0, 3.0, 2.0])
    assert group.tau == 0 and group.clear_pairs == pytest.approx(2 / 3)
    assert group.regret == 0
    [group] = planner.ranked_groups(runs(1.0, 1.0, 2.0), [1.0, 1.5, 2.0])
    assert group.tau == 1
    assert planner.ranked_groups(runs(1.0, 1.0, 1.0), [1.0, 2.0, 3.0]) == []


def test_pairs_that_are_5_percent_apart() -> None:
    """Tests that a wrong pair with nearly equal measured times counts only in `tau`."""
    [group] = planner.ranked_groups(runs(1.0, 1.01, 2.0), [1.1, 1.0, 2.0])
    assert (group.tau, group.clear_tau) == (pytest.approx(1 / 3), 1.0)
    assert group.regret == pytest.approx(0.01)
    [group] = planner.ranked_groups(runs(1.0, 1.01, 1.02), [1.0, 2.0, 3.0])
    assert group.clear_tau is None and group.clear_pairs == 0


def test_limit_of_tau_is_that_of_simulated_measurements() -> None:
    """Compares the closed form with the mean tau of 4,000 drawn measurements of known times."""
    true_s = np.array([1.0, 1.02, 1.03, 1.1, 1.3])
    random = np.random.default_rng(0)
    measured = true_s * np.exp(random.normal(0, 0.02, (4000, 5)))
    taus = [
        planner.ranked_groups(runs(*map(float, each)), list(true_s))[0].tau for each in measured
    ]
    assert planner.tau_limit(list(true_s), 0.02) == pytest.approx(np.mean(taus), abs=0.015)


def test_documented_order() -> None:
    """Compares the table with `docs/planner.md`, and prints a table that is out of date."""
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    sources = planner.rankings()
    table = planner.ranking_markdown(sources)
    assert table in page, table
    for groups in (dict(sources)[name] for name in ("vTrain multi", "vTrain single")):
        assert np.mean([each.regret for each in groups]) < 0.05
        clear = [each.clear_tau for each in groups if each.clear_tau is not None]
        assert np.mean(clear) > 0.8

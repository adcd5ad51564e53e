"""The order of layouts: closed forms of Kendall's tau and of the regret."""

from __future__ import annotations

from dataclasses import replace

import pytest
from layout_ranking import ranking
from published_runs import PublishedRun, published_runs

BASE = next(run for run in published_runs() if run.source == "vTrain multi")


def runs(*seconds: float) -> list[PublishedRun]:
    return [replace(BASE, measured_s=each) for each in seconds]


def test_ranking() -> None:
    measured = runs(1.0, 2.0, 3.0)
    assert ranking(measured, [1.0, 2.0, 3.0]) == (1.0, 0.0)
    assert ranking(measured, [3.0, 2.0, 1.0]) == (-1.0, 2.0)
    assert ranking(measured, [2.0, 1.0, 3.0]) == (pytest.approx(1 / 3), 1.0)
    assert ranking(measured[:2], [1.0, 2.0]) == (None, None)


def test_pairs_without_an_order_do_not_count() -> None:
    """Tests three pairs: one of equal measured times, one right and one wrong."""
    assert ranking(runs(1.0, 1.0, 2.0), [1.0, 3.0, 2.0]) == (0.0, 0.0)
    assert ranking(runs(1.0, 1.0, 2.0), [1.0, 1.5, 2.0]) == (1.0, 0.0)
    assert ranking(runs(1.0, 1.0, 1.0), [1.0, 2.0, 3.0]) == (None, None)

"""Published runs fit in memory: they ran."""

from __future__ import annotations

from published_runs import predict_run, published_runs


def test_almost_all_published_runs_fit() -> None:
    """Tests 98 % of the runs, and that few of those that fit have no room at all."""
    found = [predict_run(run) for run in published_runs()]
    assert sum(each.fits for each in found) > 0.98 * len(found)
    assert sum(each.tight for each in found) < 0.1 * len(found)

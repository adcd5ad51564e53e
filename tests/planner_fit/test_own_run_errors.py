"""Own runs: they make predictions of published sources better, and more of them do not harm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from left_out_errors import LeftOutSource
from own_run_errors import OwnRunErrors, own_run_errors
from published_runs import PublishedRun, grouped, predict_run, published_runs, thinned

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants

SHIPPED = default_constants()


def source_of(runs: list[PublishedRun]) -> LeftOutSource:
    predictions = tuple(predict_run(run) for run in runs)
    return LeftOutSource(
        name=runs[0].source, runs=tuple(runs), predictions=predictions, constants=SHIPPED
    )


def test_own_runs_do_not_harm() -> None:
    """Tests the means over the sources with more than three runs. The shipped constants are fitted
    to these sources, so each source gets a factor, as if its machine were unknown.
    """
    random = np.random.default_rng(0)
    found: list[list[OwnRunErrors]] = []
    for _, runs in grouped(thinned(published_runs(), 8), lambda run: run.source):
        factor = np.exp(random.normal(0, 0.1))
        changed = [replace(run, measured_s=factor * run.measured_s) for run in runs]
        rows = [own_run_errors(source_of(changed), count) for count in (1, 2, 3)]
        if None not in rows:
            found.append([each for each in rows if each])
    assert len(found) > 25
    blind = np.mean([row[0].blind_error for row in found])
    one, two, three = (np.mean([row[i].error for row in found]) for i in range(3))
    assert blind > 1.03 * one and one > two > three
    covered = [np.mean([row[i].covered for row in found]) for i in range(3)]
    assert all(0.7 < each < 0.95 for each in covered)


def test_own_runs_are_a_calibration() -> None:
    """Compares with predictions that are calibrated by hand."""
    runs = [run for run in published_runs() if run.source == "arXiv 2205.05198 table 5"][:3]
    errors = []
    for own in runs:
        known = planner.calibrate(runs=[own])
        for other in runs:
            if other is not own:
                given = other.model, other.cluster, other.layout, other.job
                found = planner.predict(*given, calibration=known)
                errors.append(abs(found.step_s / other.measured_s - 1))
    measured = own_run_errors(source_of(runs), 1)
    assert measured is not None and measured.error == pytest.approx(np.mean(errors))
    assert own_run_errors(source_of(runs), 3) is None


def test_releases_do_not_calibrate_each_other() -> None:
    run = published_runs()[0]
    both = [replace(run, table_source=name) for name in ("MLPerf 1", "MLPerf 2")]
    assert own_run_errors(source_of(both), 1) is None

"""The fit recovers hidden constants, and lists the runs that inform them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono import planner
from unisono.planner.calibration.constant_fit import (
    fit_constants,
    fit_intervals,
    informing_families,
)

pytest.importorskip("scipy")

RUNS = [run for run in planner.measured_runs() if run.family == "vTrain single"][::25]
FREE = ("eager_launch_s", "efficiency/ampere 16")


def document() -> dict[str, dict[str, dict[str, object]]]:
    """Returns the shipped file of constants and priors, with only a few constants free."""
    found: dict[str, dict[str, object]] = {}
    for name, entry in planner.constants_document()["constants"].items():
        found[name] = {"prior": entry["value"], "width": 1.0 if name in FREE else None}
    return {"constants": found}


def test_hidden_constants_are_found() -> None:
    default = planner.default_constants()
    hidden = default.changed(
        eager_launch_s=1.6 * default.eager_launch_s,
        efficiency={**default.efficiency, "ampere 16": 0.7 * default.efficiency["ampere 16"]},
    )
    runs = [replace(run, measured_s=planner.predict_run(run, hidden).step_s) for run in RUNS]
    found = fit_constants(runs, document()).values
    assert found["eager_launch_s"] == pytest.approx(hidden.eager_launch_s, rel=0.05)
    assert found["efficiency/ampere 16"] == pytest.approx(hidden.efficiency["ampere 16"], rel=0.05)
    assert found["traffic"] == default.traffic  # this constant was not free, so it keeps its value


def test_intervals_alone_keep_the_constants() -> None:
    values = {n: e["value"] for n, e in planner.constants_document()["constants"].items()}
    found = fit_intervals(RUNS, values, document())
    assert found.values == values
    assert found.covariance.names == tuple(n for n in document()["constants"] if n in FREE)
    # The width of the priors is 1, and many runs inform both constants.
    assert all(found.covariance.variance(row) < 0.1 for row in ((1, 0), (0, 1)))
    assert found.sigma["run"] < 0.05  # these runs repeat well


def test_which_runs_inform_a_constant() -> None:
    values = {n: e["value"] for n, e in planner.constants_document()["constants"].items()}
    runs = [*RUNS, *(run for run in planner.measured_runs() if run.family == "MLPerf")]
    assert informing_families(runs, values, "eager_launch_s") == ["vTrain single"]
    assert informing_families(runs, values, "efficiency/hopper 8") == ["MLPerf"]

"""The fit finds hidden constants, and the constants of all sources but one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from constant_fit import ConstantFit, constants_of
from published_runs import predict_run, published_runs

from unisono.planner.constants.calibrated_constants import (
    CalibratedConstants,
    constants_document,
    default_constants,
)

RUNS = [run for run in published_runs() if run.source == "vTrain single"][::25]
FREE = ("eager_launch_s", "efficiency/ampere 16")
DEFAULT = default_constants()


def document(width: float = 1.0) -> dict[str, dict[str, dict[str, object]]]:
    """Returns the shipped file of constants and priors, with only a few constants free."""
    found: dict[str, dict[str, object]] = {}
    for name, entry in constants_document()["constants"].items():
        found[name] = {"prior": entry["value"], "width": width if name in FREE else None}
    return {"constants": found}


def hidden_runs(host: float, rate: float) -> list[object]:
    """Returns runs whose measured times are those of other constants."""
    hidden = DEFAULT.scaled("eager_launch_s", host).scaled("efficiency/ampere 16", rate)
    return [replace(run, measured_s=predict_run(run, hidden).step_s) for run in RUNS]


def test_hidden_constants_are_found() -> None:
    found = ConstantFit(hidden_runs(1.6, 0.7), document()).values()  # type: ignore[arg-type]
    shipped = {n: e["value"] for n, e in constants_document()["constants"].items()}
    assert found["eager_launch_s"] == pytest.approx(1.6 * shipped["eager_launch_s"], rel=0.03)
    name = "efficiency/ampere 16"
    assert found[name] == pytest.approx(0.7 * shipped[name], rel=0.03)
    assert found["traffic"] == shipped["traffic"]  # not free
    # A prior with a small width keeps the constant near it.
    near = ConstantFit(hidden_runs(1.6, 0.7), document(0.001)).values()  # type: ignore[arg-type]
    assert near[name] == pytest.approx(shipped[name], rel=0.01)


def test_a_source_is_left_out() -> None:
    """Tests two sources with different constants: each alone has its own."""
    two = [replace(run, table_source="b") for run in hidden_runs(1.0, 0.8)]  # type: ignore[type-var]
    fit = ConstantFit([*RUNS_AT_1, *two], document())
    name = "efficiency/ampere 16"
    shipped = constants_document()["constants"][name]["value"]
    found = [fit.values(left_out=source)[name] / shipped for source in ("vTrain single", "b")]
    assert found == pytest.approx([0.8, 1.0], rel=0.03)
    assert 0.82 < fit.values()[name] / shipped < 0.98
    assert fit.informing(name) == ["vTrain single", "b"]


RUNS_AT_1 = [replace(run, measured_s=predict_run(run).step_s) for run in RUNS]


def test_constants_say_where_they_come_from() -> None:
    sources = {run.source for run in published_runs()}
    for name, entry in constants_document()["constants"].items():
        assert {"value", "prior", "unit"} <= set(entry), name
        assert set(entry.get("fitted_to", [])) <= sources, name
        if entry.get("width"):
            # Outside of its range, a constant would no longer mean what its name says.
            log, width = np.log(entry["prior"]), entry["width"]
            low, high = entry.get("range", np.exp([log - 4 * width, log + 4 * width]))
            assert low <= entry["value"] <= high, name


def test_doubling_a_constant_is_seen() -> None:
    """Tests that a wrong constant increases the errors of the runs to which it was fitted."""

    def error(constants: CalibratedConstants) -> float:
        steps = [predict_run(run, constants).step_s / run.measured_s for run in RUNS]
        return float(np.mean(np.abs(np.log(steps))))

    for name in ("eager_launch_s", "efficiency/ampere 16", "link_start_s"):
        assert error(DEFAULT.scaled(name, 2)) > error(DEFAULT), name


def test_constants_of_values() -> None:
    values = {n: e["value"] for n, e in constants_document()["constants"].items()}
    assert constants_of(values) == DEFAULT
    assert constants_of({**values, "traffic": 2.0}).traffic == 2.0

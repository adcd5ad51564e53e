"""The published runs to which no constant is fitted, and the errors on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from unisono import planner


@pytest.fixture(scope="module")
def rows() -> dict[str, planner.JudgedErrors]:
    return {row.source: row for row in planner.judged_errors()}


def test_no_constant_is_fitted_to_these_runs() -> None:
    judged, fitted = planner.judged_runs(), planner.measured_runs()
    sources = {run.source for run in judged}
    assert len(judged) > 300 and len(sources) > 25
    assert not sources & {run.source for run in fitted}
    for entry in planner.constants_document()["constants"].values():
        assert not sources & set(entry.get("fitted_to", []))

    def settings(run: planner.MeasuredRun) -> tuple[object, ...]:
        return run.model, run.cluster, run.layout, run.job, round(run.measured_s, 2)

    assert not {settings(run) for run in judged} & {settings(run) for run in fitted}


def test_rates_are_possible() -> None:
    """Tests each measured time against the peak rate of the devices: the FLOPs of a step without
    recomputation are 6 for each active parameter (the look-up in the embedding has none) and token,
    and 6 x layers x heads x head size x sequence of causal attention.
    """
    for run in planner.judged_runs():
        model, device = run.model, run.cluster.kind
        looked_up = 0 if model.tied else model.vocab * model.hidden
        attention = model.layers * model.heads * model.head_dim * run.job.seq
        flops = 6 * run.job.tokens * (model.active_parameters - looked_up + attention)
        seconds = flops / device.peak_of(run.job.precision) / run.cluster.devices
        assert 0.015 < seconds / run.measured_s < 0.7, (run.source, run.name, run.layout.text())


def test_columns_that_the_other_table_lacks() -> None:
    models = {run.name: run.model for run in planner.judged_runs()}
    assert models["DeepSeek-V3"] == planner.load_model("deepseek-v3")
    assert models["Kimi K2"].parameters == pytest.approx(1.03e12, rel=0.01)
    assert models["Grok-1, 64 layers"].parameters == pytest.approx(314e9, rel=0.01)
    layouts = [run.layout for run in planner.judged_runs()]
    assert {layout.schedule for layout in layouts} == {"1f1b", "zb1p", "dualpipev"}
    assert {layout.dp_replicate for layout in layouts} == {1, 12, 16}
    rates = {run.source: run.cluster.network_Bps for run in planner.judged_runs()}
    assert rates["BLOOM tuning"] == 6.25e9 and rates["KempnerForge"] is None
    software = {run.source: run.job.software for run in planner.judged_runs()}
    assert software["MT-NLG 530B"] == "megatron-2021" and software["KempnerForge"] is None


def test_errors_of_known_predictions() -> None:
    """Tests the errors on three runs whose measured times are known multiples of their
    predictions.
    """
    group = [run for run in planner.judged_runs() if run.source == "BLOOM tuning"][:3]
    predicted = [planner.predict_run(run, planner.default_constants()).step_s for run in group]
    factors = dict(zip(sorted(predicted), (2.0, 1.0, 0.8), strict=True))
    runs = [
        replace(run, measured_s=seconds * factors[seconds], memory_bytes=None)
        for run, seconds in zip(group, predicted, strict=True)
    ]
    used = planner.predict_run(runs[0], planner.default_constants()).memory_bytes
    runs[0] = replace(runs[0], memory_bytes=used / 0.9)
    [row] = planner.judged_errors(runs)
    assert (row.source, row.runs) == ("BLOOM tuning", 3)
    assert row.error == pytest.approx((0.5 + 0 + 0.25) / 3)
    assert row.bias == pytest.approx(np.log(2.0 * 0.8) / 3)
    assert row.covered == pytest.approx(1 / 3)
    assert row.fits == 1 and row.memory == pytest.approx(0.1)
    measured = sorted(run.measured_s for run in runs)
    assert row.tau == -1 and row.regret == pytest.approx(measured[-1] / measured[0] - 1)


def test_documented_errors(rows: dict[str, planner.JudgedErrors]) -> None:
    """Compares the table with `docs/planner.md`, and prints a table that is out of date."""
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    table = planner.judged_markdown(list(rows.values()))
    assert table in page, table


def test_sources_that_constants_fit_well(rows: dict[str, planner.JudgedErrors]) -> None:
    for source in ("arXiv 2401.10241 table 4", "Megatron-LM README 2020"):
        assert rows[source].error < 0.1 and rows[source].covered > 0.85, source
    errors = [row.error for row in rows.values()]
    assert np.median(errors) < 0.14 and np.mean(errors) < 0.16


def test_intervals_hold_most_runs(rows: dict[str, planner.JudgedErrors]) -> None:
    """Tests the means over the runs and over the sources."""
    covered = [row.covered for row in rows.values()]
    assert 0.75 <= np.average(covered, weights=[row.runs for row in rows.values()]) <= 0.9
    assert 0.75 <= np.mean(covered) <= 0.9

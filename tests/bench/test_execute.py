from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unisono.bench.results import RunReport
from unisono.commands import bench_run
from unisono.commands.main import app


def test_only_json_goes_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, report: RunReport
) -> None:
    monkeypatch.setattr(bench_run, "run_benchmark", lambda *cases, **options: report)
    result = CliRunner().invoke(app, ["bench", "all_reduce", "--json", "-"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["ours"] == "unisono"


def test_a_wrong_result_sets_the_exit_code_after_files_are_written(
    monkeypatch: pytest.MonkeyPatch, report: RunReport, tmp_path: Path
) -> None:
    row = report.rows[0]
    wrong = replace(row, measurements=(replace(row.measurements[0], wrong=1),))
    spoilt = replace(report, rows=(wrong,))
    monkeypatch.setattr(bench_run, "run_benchmark", lambda *cases, **options: spoilt)
    path = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["bench", "all_reduce", "--json", str(path)])
    assert result.exit_code == 1
    assert "WRONG RESULTS" in result.stdout
    assert json.loads(path.read_text())["wrong"] == 1


def test_our_contestant_comes_first_and_the_limit_last(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(bench_run, "execute", lambda request: seen.append(request.contestants) or 0)
    arguments = ["bench", "broadcast,barrier", "--api", "torch", "--against", "gloo,unisono:ring"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert seen == [("unisono-torch", "gloo", "unisono:ring", "memory")]


def test_over_hosts_the_limit_is_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bench_run.BenchRequest] = []
    monkeypatch.setattr(bench_run, "execute", lambda request: seen.append(request) or 0)
    words = ["bench", "all_reduce", "--hosts", "3", "--per-host", "2", "--rate", "1gbit"]
    assert CliRunner().invoke(app, [*words, "--against", "gloo"]).exit_code == 0
    (request,) = seen
    assert request.contestants == ("unisono", "gloo", "network")
    assert {case.ranks for case in request.cases} == {6}

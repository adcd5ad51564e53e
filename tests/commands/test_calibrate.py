from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unisono.commands.main import app


def unisono(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


@pytest.fixture(autouse=True)
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "op": "all_reduce",
            "ranks": 4,
            "size_bytes": nbytes,
            "results": {"unisono": {"time_s": 12e-6 + nbytes * 1.5e-9, "spread_s": None}},
        }
        for nbytes in (64, 1024, 16384, 262144, 4194304)
    ]
    Path("bench.json").write_text(json.dumps({"rows": rows}))


def test_calibrate_and_simulate_predict_measured_times() -> None:
    code, output = unisono(
        *(
            "calibrate",
            "bench.json",
            "--algorithm",
            "ring",
            "--out",
            "model.json",
            "--json",
            "c.json",
        )
    )
    assert code == 0 and "written: model.json" in output
    (model,) = json.loads(Path("c.json").read_text())["models"]
    assert model["held_out"]["mean"] < 1e-6
    # latency of each of the 6 rounds of a ring with 4 ranks
    assert model["regimes"][0]["alpha_s"] == pytest.approx(2e-6)
    assert model["regimes"][0]["byte_s"] == pytest.approx(1e-9)
    common = ("simulate", "all_reduce", "ring", "-t", "star:4", "--size", "1M", "--json", "s.json")
    code, output = unisono(*common, "--model", "model.json")
    assert code == 0 and "messages as measured: all_reduce on 4 ranks (bench.json)" in output
    found = json.loads(Path("s.json").read_text())
    assert found["algorithms"][0]["time_s"] == pytest.approx(12e-6 + (1 << 20) * 1.5e-9)
    # The lower bound of the time is computed with the measured bandwidth of the links.
    assert found["bound_s"] == pytest.approx((1 << 20) * 1.5e-9)


def test_several_runs_give_one_model() -> None:
    Path("again.json").write_text(Path("bench.json").read_text())
    code, output = unisono("calibrate", "bench.json", "again.json", "--json", "c.json")
    assert code == 0, output
    (model,) = json.loads(Path("c.json").read_text())["models"]
    assert model["source"] == "bench.json, again.json"


def test_bench_prints_predicted_times() -> None:
    code, output = unisono(
        *("bench", "all_reduce", "-n", "2", "--sizes", "1K", "--against", "", "--rounds", "1"),
        *("--round-s", "0.001", "--predict", "bench.json", "--json", "out.json"),
    )
    assert code == 0 and "predicted us" in output
    (row,) = json.loads(Path("out.json").read_text())["rows"]
    # `direct` has two rounds. A rank sends 3/4 of the bytes with 4 ranks, and half with 2 ranks.
    assert row["predicted_s"] == pytest.approx(2 * (6e-6 + 512 * 1e-9))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["calibrate", "none.json"], "No such file"),
        (["calibrate", "bench.json", "--contestant", "gloo"], "'gloo' was not measured"),
        (["calibrate", "bench.json", "--algorithm", "rign"], "has no algorithm"),
        (["bench", "broadcast", "--predict", "bench.json"], "no model of broadcast, only of"),
        (["simulate", "all_reduce", "-t", "star:4", "--model", "none"], "No such file"),
        (
            ["simulate", "all_reduce", "-t", "star:4", "--model", "bench.json", "--in-network"],
            "does not describe switches that reduce",
        ),
    ],
)
def test_refusals(arguments: list[str], error: str) -> None:
    code, output = unisono(*arguments)
    assert code == 2 and error in output

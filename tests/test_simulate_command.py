from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from unisono.cli import app


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def simulate(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments], env={"COLUMNS": "160"})
    return result.exit_code, result.output


def test_league_table_and_files() -> None:
    code, output = simulate(
        *("all_reduce", "-t", "torus:4x4", "--size", "1M", "--compare", "all"),
        *("--svg", "t.svg", "--heat", "h.svg", "--trace", "t.json", "--sizes", "1K:1M:x32"),
    )
    assert code == 0
    lines = output.splitlines()
    places = {
        name: next(i for i, line in enumerate(lines) if line.startswith(f"│ {name} "))
        for name in ("torus_rings", "ring", "one_shot")
    }
    assert places["torus_rings"] < places["ring"] < places["one_shot"]
    assert "swing:ports=4" in output and "of the bound" in output and "written: t.svg" in output
    for picture in ("t.svg", "h.svg"):
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert "halving_doubling" in Path("t.svg").read_text()
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(16))
    assert any(event.get("args", {}).get("critical") for event in events)


def test_json_of_one_algorithm() -> None:
    arguments = ["all_reduce", "ring", "-t", "ring:4,bandwidth=1GB,latency=0ns", "--size", "4M"]
    result = CliRunner().invoke(app, ["simulate", *arguments, "--json", "-"])
    found = json.loads(result.stdout)
    assert [row["algorithm"] for row in found["algorithms"]] == ["ring"]
    assert found["algorithms"][0]["time_s"] == pytest.approx(1.5 * (4 << 20) / 1e9)
    assert found["algorithms"][0]["busiest_link_utilisation"] == pytest.approx(1)
    assert found["bound_s"] == pytest.approx(0.75 * (4 << 20) / 1e9)


def test_some_algorithms_and_conditions() -> None:
    names = "ring, direct, recursive_halving"
    code, output = simulate("all_reduce", "-t", "mesh:4", "--compare", names)
    assert code == 0 and "left out: recursive_halving" in output
    assert "critical path: " in simulate("all_reduce", "ring", "-t", "ring:4")[1]
    simulate("all_reduce", "ring", "-t", "ring:4", "--json", "whole.json")
    conditions = ["--degraded", "0=0.5", "--overhead", "1e-6", "--failed", "7"]
    simulate("all_reduce", "ring", "-t", "ring:4", "--json", "less.json", *conditions)
    whole, less = (json.loads(Path(name).read_text()) for name in ("whole.json", "less.json"))
    assert less["algorithms"][0]["time_s"] > 1.5 * whole["algorithms"][0]["time_s"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["all_reduce", "-t", "tours:4x4"], "is no topology"),
        (["reduce_all", "-t", "ring:4"], "is none of the operations"),
        (["all_reduce", "rign", "-t", "ring:4"], "has no algorithm"),
        (["all_reduce", "swing:dims=3x3", "-t", "torus:3x3"], "powers of two"),
        (["all_reduce", "ring", "-t", "ring:4", "--size", "many"], "not a size"),
        (["all_reduce", "ring", "-t", "ring:4", "--failed", "99"], "no link 99"),
        (["all_reduce", "ring", "-t", "ring:4", "--degraded", "3"], "links are ids"),
        (["all_reduce", "ring", "-t", "ring:4", "--heat", "h.png"], "must end in .svg"),
        (["all_reduce", "ring", "-t", "ring:4", "--levels", "two"], "written as in 4x8"),
    ],
)
def test_refusals(arguments: list[str], told: str) -> None:
    code, output = simulate(*arguments)
    assert code == 2 and told in " ".join(output.replace("│", " ").split())

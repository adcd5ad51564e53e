from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unisono import planner
from unisono.commands.main import app

GPT = ("--model", "gpt3-7.5b", "--cluster", "a100:16", "--batch", "64")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "150"})
    return result.exit_code, result.output


def test_the_fastest_layouts_and_their_file() -> None:
    code, output = plan(*GPT, "--save", "layout.json", "--keep", "3", "--explain")
    assert code == 0, output
    for text in ("80 % interval", "combinations", "matrix products", "written: layout.json"):
        assert text in output
    assert planner.Layout.load("layout.json").devices == 16


def test_json() -> None:
    result = CliRunner().invoke(app, ["plan", *GPT, "--keep", "2", "--json", "-"])
    layouts = json.loads(result.stdout)["layouts"]
    assert len(layouts) == 2
    assert layouts[0]["step_s"] == pytest.approx(sum(layouts[0]["time_s"].values()))


def test_one_layout_by_text_and_by_file() -> None:
    planner.Layout(dp=2, tp=8).save("layout.json")
    for layout in ("dp=2,tp=8", "layout.json"):
        code, output = plan(*GPT, "--layout", layout, "--recompute", "full")
        assert code == 0 and "dp2 tp8" in output
    code, output = plan(*GPT, "--layout", "dp=16", "--micro-batch", "4", "--recompute", "none")
    assert code == 0 and "does not fit; fits with" in output.replace("\n", " ")


def test_own_cluster() -> None:
    Path("mine.json").write_text('{"device": "a100", "devices": 16, "network_Bps": 1e9}')
    code, output = plan("--model", "gpt3-1.7b", "--cluster", "mine.json", "--batch", "64")
    assert code == 0, output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "--model, --cluster and --batch are needed"),
        (("--model", "gpt5", *GPT[2:]), "no model is named 'gpt5'"),
        ((*GPT[:2], "--cluster", "b100:8", *GPT[4:]), "no device is named 'b100'"),
        ((*GPT, "--layout", "dp=3"), "the cluster has 16 devices"),
        ((*GPT, "--layout", "dq=3"), "not 'dq=3'"),
        ((*GPT, "--precision", "fp7"), "precision must be one of"),
    ],
)
def test_refusals(arguments: tuple[str, ...], text: str) -> None:
    code, output = plan(*arguments)
    assert code == 2
    assert text in " ".join(output.replace("│", " ").split())


def test_validation() -> None:
    result = CliRunner().invoke(app, ["plan", "--validate", "--json", "out.json"])
    assert result.exit_code == 0
    for text in ("held out", "vTrain single", "eager_launch_s", "reserved memory"):
        assert text in result.output
    found = json.loads(Path("out.json").read_text())
    assert {"errors", "memory", "constants"} <= set(found)


def test_a_given_network() -> None:
    given = ("--layout", "dp=8,tp=2", "--topology")
    fast = plan(*GPT, *given, "torus:4x4,bandwidth=400Gbit", "--json", "fast.json")
    slow = plan(*GPT, *given, "torus:4x4,bandwidth=4Gbit", "--json", "slow.json")
    assert fast[0] == slow[0] == 0, fast[1] + slow[1]
    times = [json.loads(Path(f"{name}.json").read_text()) for name in ("fast", "slow")]
    steps = [found["layouts"][0]["step_s"] for found in times]
    assert steps[1] > steps[0]

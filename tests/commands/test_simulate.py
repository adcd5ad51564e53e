from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from unisono.commands.main import app


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def simulate(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments], env={"COLUMNS": "160"})
    return result.exit_code, result.output


def test_comparison_table_and_files() -> None:
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
    assert code == 0 and "skipped: recursive_halving" in output
    assert "critical path: " in simulate("all_reduce", "ring", "-t", "ring:4")[1]
    simulate("all_reduce", "ring", "-t", "ring:4", "--json", "whole.json")
    conditions = ["--degraded", "0=0.5", "--overhead", "1e-6", "--failed", "0-3"]
    simulate("all_reduce", "ring", "-t", "ring:4", "--json", "less.json", *conditions)
    whole, less = (json.loads(Path(name).read_text()) for name in ("whole.json", "less.json"))
    assert less["algorithms"][0]["time_s"] > 1.5 * whole["algorithms"][0]["time_s"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["all_reduce", "-t", "tours:4x4"], "unknown topology 'tours'"),
        (["reduce_all", "-t", "ring:4"], "is not one of the operations"),
        (["all_reduce", "rign", "-t", "ring:4"], "has no algorithm"),
        (["all_reduce", "-t", "ring:4", "--compare", "ring,rign"], "has no algorithm"),
        (["all_reduce", "swing:dims=3x3", "-t", "torus:3x3"], "powers of two"),
        (["all_reduce", "ring", "-t", "ring:4", "--size", "many"], "not a size"),
        (["all_reduce", "ring", "-t", "ring:4", "--failed", "99"], "link 99 does not exist"),
        (["all_reduce", "ring", "-t", "ring:4", "--degraded", "3"], "as in 5=0.5"),
        (["all_reduce", "ring", "-t", "ring:4", "--failed", "a"], "a link's id or two nodes"),
        (["all_reduce", "ring", "-t", "ring:4", "--failed", "0-2"], "no link from node 0"),
        (["all_reduce", "ring", "-t", "ring:4", "--degraded", "3=2"], "above 0 and at most 1"),
        (["all_reduce", "ring", "-t", "ring:4", "--in-network"], "no switch that reduces"),
        (["all_reduce", "ring", "-t", "torus:9999999x9999999"], "does not fit into memory"),
        (["all_reduce", "ring", "-t", "ring:4", "--heat", "h.png"], "must end in .svg"),
        (["all_reduce", "ring", "-t", "ring:4", "--levels", "two"], "as in 4x8"),
        (["all_reduce", "-t", "ring:4", "--compare", ""], "expects names of algorithms"),
        (["all_reduce", "ring", "-t", "ring:4", "--levels", "2x2"], "--levels: ring takes none"),
        (["all_reduce", "bucket:dims=4", "-t", "ring:4", "--levels", "2x2"], "names its own"),
        (
            ["all_reduce", "ring", "-t", "ring:4", "--compare", "direct"],
            "--compare cannot be combined",
        ),
        (["all_reduce", "ring", "-t", "ring:4", "--sizes", "1K"], "--sizes needs --svg"),
        (["all_reduce", "ring", "-t", "ring:4", "--budget", "3"], "--budget needs --search"),
    ],
)
def test_refusals(arguments: list[str], error: str) -> None:
    code, output = simulate(*arguments)
    assert code == 2 and error in " ".join(output.replace("│", " ").split())


def test_a_sweep_as_table_picture_and_json() -> None:
    code, output = simulate(
        *("all_reduce", "--compare", "ring,direct", "-t", "star:16,latency=0ns", "--size", "64M"),
        *("--sweep", "hosts=2,4,8", "--compute", "10ms", "--svg", "s.svg", "--json", "s.json"),
    )
    assert code == 0 and "scale factor" in output and "written: s.svg" in output
    points = json.loads(Path("s.json").read_text())["points"]
    assert [point["ranks"] for point in points] == [2, 4, 8]
    for point in points:
        ring = next(row for row in point["algorithms"] if row["algorithm"] == "ring")
        n = point["ranks"]
        assert ring["time_s"] == pytest.approx(2 * (n - 1) / n * (64 << 20) / 50e9)
        best = min(row["time_s"] for row in point["algorithms"])
        assert point["scale_factor"] == pytest.approx(10e-3 / (10e-3 + best))
    text = Path("s.svg").read_text()
    assert "scale factor, 10 ms of computation" in text and ">80%<" in text and ">direct<" in text
    assert ElementTree.fromstring(text).tag.endswith("svg")


def test_a_sweep_over_ranks_has_one_ranks_column() -> None:
    code, output = simulate("all_reduce", "ring", "-t", "ring:4", "--sweep", "ranks=2,4")
    head = next(line for line in output.splitlines() if "algorithm" in line)
    assert code == 0 and head.count("ranks") == 1


def test_a_sweep_over_bandwidths_is_drawn() -> None:
    sweep = ["--sweep", "bandwidth=100Gbit,400Gbit", "--svg", "b.svg"]
    code, output = simulate("all_reduce", "ring", "-t", "fat_tree:4", *sweep)
    assert code == 0 and "400Gbit" in output and "of the bound" in output
    assert "12.5 GB/s" in Path("b.svg").read_text()


def test_a_search_as_table_and_json() -> None:
    arguments = ["all_reduce", "-t", "grid:4x4", "--size", "8K", "--compare", "ring"]
    code, output = simulate(*arguments, "--search", "--json", "f.json", "--heat", "h.svg")
    assert code == 0 and "ranks 0, 1, ... are: 0 1 2 3 7" in output and "written: h.svg" in output
    found = json.loads(Path("f.json").read_text())
    assert found["found"][0]["order"] == "snake"
    assert sorted(found["found"][0]["placement"]) == list(range(16))
    assert found["simulated"] > 3


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--sweep", "hosts"], "as in hosts=2,4,8"),
        (["--sweep", "hosts=2,64"], "has 1 to 16 hosts"),
        (["--sweep", "spines=2"], "unknown option spines"),
        (["--sweep", "hosts=2", "--search"], "not both"),
        (["--sweep", "hosts=2", "--heat", "h.svg"], "cannot be combined with --sweep"),
        (["--sweep", "kind=roce,ethernet", "--svg", "k.svg"], "expected a number above 0"),
        (["--compute", "10ms"], "--compute needs --sweep"),
        (["--sweep", "hosts=2", "--compute", "long"], "expected a time"),
        (["--search", "--svg", "s.svg"], "draws no chart"),
    ],
)
def test_refusals_of_sweeps_and_searches(arguments: list[str], error: str) -> None:
    code, output = simulate("all_reduce", "ring", "-t", "fat_tree:4", *arguments)
    assert code == 2 and error in " ".join(output.replace("│", " ").split())


def test_a_barrier_is_refused() -> None:
    code, output = simulate("barrier", "-t", "ring:4")
    assert code == 2
    assert "a barrier moves no data" in output


def test_a_sweep_without_a_bound_has_no_bound_column() -> None:
    _, some = simulate("all_reduce", "ring", "-t", "torus:4x4", "--sweep", "ranks=2,4")
    _, all_there_are = simulate("all_reduce", "ring", "-t", "torus:4x4", "--sweep", "ranks=4,16")
    assert "of the bound" not in some
    assert "of the bound" in all_there_are


def test_a_slow_algorithm_is_skipped_unless_named() -> None:
    spec = ("-t", "star:256", "--size", "1M")
    code, output = simulate("all_reduce", *spec, "--budget", "0")
    assert code == 2 and "skipped: the budget of 0 s for all algorithms was spent" in output
    assert simulate("all_reduce", "leaders", *spec)[0] == 0


def test_a_pipeline_schedule_is_written_drawn_and_simulated() -> None:
    """Compares with passes of 1 ms and 2 ms and messages of 1 ms, by hand: GPipe with 2 ranks and 1
    microbatch runs F, a message, F, B, a message, B.
    """
    arguments = ("gpipe", "-n", "2", "--microbatches", "1", "--activation", "1000000")
    result = CliRunner().invoke(app, ["show", *arguments, "--json", "p.json"])
    assert result.exit_code == 0 and "step 6 ms" in result.output
    assert ElementTree.parse("gpipe-2.svg").getroot().tag.endswith("svg")
    code, output = simulate(
        *("p.json", "-t", "mesh:2,bandwidth=1GB,latency=0s", "--json", "out.json"),
        *("--svg", "p.svg", "--heat", "h.svg", "--trace", "t.json"),
    )
    assert code == 0 and "exposed messages: 2 ms" in output
    found = json.loads(Path("out.json").read_text())
    assert found["step_s"] == pytest.approx(8e-3) and found["ideal_step_s"] == pytest.approx(6e-3)
    assert found["bubble"] == pytest.approx(1 - 3 / 8) and found["sent_bytes"] == [10**6] * 2
    assert [each["pass"] for each in found["ranks"][0]] == ["0F0", "0B0"]
    for picture in ("p.svg", "h.svg"):
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    names = {event["name"] for event in json.loads(Path("t.json").read_text())["traceEvents"]}
    assert {"0F0", "1B0", "0F0 to 1F0", "1B0 to 0B0"} <= names
    assert "step 6 ms" in CliRunner().invoke(app, ["show", "p.json", "--no-files"]).output


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["p.json", "-t", "ring:2"], "p.json: cannot be read"),
        (["p.json", "ring", "-t", "ring:2"], "p.json is a pipeline schedule"),
        (["p.json", "-t", "ring:2", "--size", "1M"], "--size applies to operations"),
        (["p.json", "-t", "ring:2", "--search"], "--search applies to operations"),
    ],
)
def test_refusals_of_pipelines(arguments: list[str], error: str) -> None:
    code, output = simulate(*arguments)
    assert code == 2 and error in " ".join(output.split())

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unisono import planner
from unisono.commands.main import app

GPT = ("--model", "gpt3-7.5b", "--cluster", "a100:16", "--batch", "64")
CLICKS = ("--model", "dlrm-mlperf", "--cluster", "a100:8", "--batch", "65536")


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


def test_layouts_without_the_headroom_are_told() -> None:
    code, output = plan(*GPT, "--headroom", "0.99", "--keep", "1")
    assert code == 0
    assert "no layout leaves 99% of the memory free, so all that fit were considered" in output
    assert "no layout leaves" not in plan(*GPT, "--keep", "1")[1]


def test_rows_that_differ() -> None:
    code, output = plan(*GPT, "--price", "2", "--schedules", "1f1b,zbv", "--json", "out.json")
    assert code == 0, output
    for text in (
        "tokens/s",
        "a device",
        "headroom",
        "cost of 1e9",
        "better than row 1",
        "tie: each",
    ):
        assert text in output
    layouts = json.loads(Path("out.json").read_text())["layouts"]
    axes = [tuple(each["layout"][name] for name in ("tp", "pp", "cp", "ep")) for each in layouts]
    assert len(set(axes)) == len(axes) == 10
    first = layouts[0]
    assert first["chance"] == 0.5 and layouts[-1]["chance"] < 0.5
    cost = 1e9 / first["tokens_per_s"] / 3600 * 16 * 2
    assert f"{cost:,.2f}" in output
    others = {each["setting"]: each["step_s"] for each in first["alternatives"]}
    assert min(others.values()) >= first["step_s"]


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
        ((*GPT, "--layout", "sp=1"), "a layout has no sp; sequence_parallel is its name"),
        ((*GPT, "--precision", "fp7"), "precision must be one of"),
        ((*GPT, "--seq", "0"), "seq must be at least 1, not 0"),
        ((*GPT[:2], "--cluster", "Tesla V100-SXM2-32GB:16", *GPT[4:]), "precision fp16 works"),
    ],
)
def test_refusals(arguments: tuple[str, ...], text: str) -> None:
    code, output = plan(*arguments)
    assert code == 2
    assert text in " ".join(output.replace("│", " ").split())


def test_a_given_network() -> None:
    given = ("--layout", "dp=8,tp=2", "--topology")
    fast = plan(*GPT, *given, "torus:4x4,bandwidth=400Gbit", "--json", "fast.json")
    slow = plan(*GPT, *given, "torus:4x4,bandwidth=4Gbit", "--json", "slow.json")
    assert fast[0] == slow[0] == 0, fast[1] + slow[1]
    times = [json.loads(Path(f"{name}.json").read_text()) for name in ("fast", "slow")]
    steps = [found["layouts"][0]["step_s"] for found in times]
    assert steps[1] > steps[0]


def test_stated_software() -> None:
    one = (*GPT, "--layout", "dp=4,tp=4,zero=1", "--recompute", "full", "--micro-batch", "1")
    steps = []
    for name in ("megatron-2021", "transformer-engine"):
        code, output = plan(*one, "--software", name, "--json", "out.json")
        assert code == 0, output
        steps.append(json.loads(Path("out.json").read_text())["layouts"][0]["step_s"])
    assert steps[0] > steps[1]
    code, output = plan(*one, "--software", "megatron")
    assert code == 2 and "software must be one of megatron-2021" in " ".join(output.split())


RUN = {
    "model": "gpt3-7.5b",
    "cluster": "a100:16",
    "layout": "dp=4,tp=4,sequence_parallel=1,zero=1",
    "job": {"seq": 2048, "global_batch": 64, "micro_batch": 2, "recompute": "selective"},
    "step_s": 3.0,
}


def test_calibration_from_own_files() -> None:
    header = "# all_reduce_perf -b 1M -e 1G -g 8\n"
    ranks = "".join(f"#  Rank {rank} Group 0 Pid 1 on node device {rank}\n" for rank in range(8))
    rows = "".join(
        f"{size} {size // 4} float sum -1 {20 + size / 1e5:.1f} 1 1 0 1 1 1 0\n"
        for size in (2**20, 2**24, 2**28, 2**30)
    )
    Path("nccl.txt").write_text(header + ranks + rows)
    Path("own.json").write_text(json.dumps([RUN]))
    code, output = plan("--calibrate", "nccl.txt", "own.json", "--cluster", "a100:16")
    assert code == 0, output
    for text in ("in a domain", "measured / predicted", "written: calibration.json"):
        assert text in output
    one = ("--layout", RUN["layout"], "--micro-batch", "2", "--recompute", "selective")
    assert plan(*GPT, *one, "--json", "blind.json")[0] == 0
    code, output = plan(
        *GPT, *one, "--calibration", "calibration.json", "--explain", "--json", "known.json"
    )
    assert code == 0 and "after 1 own run" in output
    blind, known = (
        json.loads(Path(f"{name}.json").read_text())["layouts"][0] for name in ("blind", "known")
    )
    assert known["high_s"] / known["low_s"] < blind["high_s"] / blind["low_s"]
    assert abs(known["step_s"] - 3) < abs(blind["step_s"] - 3) and known["own_runs"] == 1


def test_objectives_and_limits() -> None:
    for objective in ("cost", "devices", "memory"):
        code, output = plan(*GPT, "--objective", objective, "--keep", "2", "--longest", "60")
        assert code == 0, output
    code, output = plan(*GPT, "--objective", "devices", "--keep", "3", "--json", "few.json")
    layouts = json.loads(Path("few.json").read_text())["layouts"]
    assert layouts[0]["devices"] < 16 and "devices" in output


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        (("--trainable", "lora:8"), {"trainable": "lora:8"}),
        (("--document", "256"), {"document": 256}),
        (("--padding", "0.25"), {"padding": 0.25}),
        (("--offload",), {"offload": True}),
        (("--context", "allgather"), {"context": "allgather"}),
    ],
)
def test_settings_of_the_workload(option: tuple[str, ...], setting: dict[str, object]) -> None:
    layout = ("--layout", "dp=4,cp=2,tp=2,zero=1", "--recompute", "full", "--micro-batch", "1")
    code, output = plan(*GPT, *layout, *option, "--json", "out.json")
    assert code == 0, output
    found = json.loads(Path("out.json").read_text())["layouts"][0]
    job = planner.Workload(seq=2048, global_batch=64, micro_batch=1, recompute="full", **setting)
    step = planner.predict("gpt3-7.5b", "a100:16", layout[1], job)
    assert found["step_s"] == step.step_s and found["tokens_per_s"] == step.tokens_per_s
    assert found["host_bytes"] == step.host_bytes
    assert ("in the host" in output) == ("offload" in setting)


def test_fewest_devices_for_some_days() -> None:
    found = {}
    for days in (20, 40):
        code, output = plan(*GPT, "--tokens", "3e10", "--days", str(days), "--json", "out.json")
        assert code == 0, output
        found[days] = json.loads(Path("out.json").read_text())
        assert found[days]["training"]["seconds"] <= days * 86400
    devices = [each["layouts"][0]["devices"] for each in found.values()]
    assert devices[1] < devices[0] < 16
    code, output = plan(*GPT, "--tokens", "3e10", "--days", "1")
    assert code == 2 and "the shortest takes" in " ".join(output.replace("│", " ").split())


def test_pareto_front_and_scaling() -> None:
    code, output = plan(*GPT, "--pareto", "--json", "front.json")
    assert code == 0 and "Pareto front" in output
    front = json.loads(Path("front.json").read_text())["front"]
    assert len({each["devices"] for each in front}) > 1
    code, output = plan(*GPT, "--scaling", "--json", "scaling.json")
    assert code == 0 and "scale factor" in output
    curve = json.loads(Path("scaling.json").read_text())["scaling"]
    assert curve[0]["scale_factor"] == 1 and curve[-1]["devices"] == 16


@pytest.mark.parametrize("options", [(), ("--layout", "dp=4,tp=4,zero=1")])
def test_picture_of_the_four_walls(options: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    code, output = plan(*GPT, *options, "--plot", "walls.svg")
    assert code == 0 and "written: walls.svg" in output
    drawn = Path("walls.svg").read_text()
    assert all(
        f"<!-- {wall}" in drawn for wall in ("memory:", "performance:", "communication:", "tuning:")
    )


def test_picture_of_a_front() -> None:
    pytest.importorskip("matplotlib")
    code, output = plan(*GPT, "--pareto", "--plot", "front.png")
    assert code == 0 and "written: front.png" in output
    assert Path("front.png").read_bytes().startswith(b"\x89PNG")


def test_cost_checkpoints_and_sensitivity() -> None:
    code, output = plan(
        *(*GPT, "--layout", "dp=4,tp=4,zero=1", "--tokens", "1e12", "--price", "2"),
        *("--checkpoints", "--failure-hours", "1000", "--sensitivity", "--json", "out.json"),
    )
    assert code == 0, output
    for text in ("device hours", "cost", "goodput", "rate of matrix products"):
        assert text in output
    found = json.loads(Path("out.json").read_text())
    assert found["training"]["cost"] == pytest.approx(2 * found["training"]["device_hours"])
    assert found["checkpoints"]["failure_s"] == pytest.approx(3600 * 1000 / 16)
    assert sum(row["elasticity"] for row in found["sensitivity"]) == pytest.approx(1, abs=0.02)
    steps = found["layouts"][0]["step_s"] * found["training"]["steps"]
    assert found["training"]["seconds"] * found["checkpoints"]["goodput"] == pytest.approx(steps)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("file.txt", *GPT), "FILES need --calibrate"),
        (("--calibrate",), "--calibrate needs FILES"),
        (("--calibrate", "none.txt"), "none.txt: cannot be read"),
        ((*GPT, "--calibration", "none.json"), "none.json: cannot be read"),
        ((*GPT, "--scaling", "--plot", "x.png"), "--plot does not draw --scaling"),
        ((*GPT, "--weak"), "--weak needs --scaling"),
        ((*GPT, "--watts", "400"), "--watts needs --tokens"),
        ((*GPT, "--days", "4"), "--days needs --tokens"),
        ((*GPT, "--days", "4", "--tokens", "1e9", "--longest", "9"), "state one of them"),
        ((*GPT, "--schedules", "zbv", "--layout", "dp=16"), "write schedule=zbv in --layout"),
        ((*GPT, "--schedules", "dualpipe"), "dualpipev has the same bubble"),
        ((*GPT, "--pareto", "--explain"), "are of one layout"),
        ((*GPT, "--scaling", "--layout", "dp=16"), "leave --layout out"),
        ((*GPT, "--objective", "cost", "--layout", "dp=16"), "leave --layout out"),
        ((*GPT, "--pareto", "--save", "x.json"), "--save writes one layout"),
        ((*GPT, "--objective", "joy"), "objective must be one of"),
        ((*GPT, "--checkpoints", "--failure-hours", "-1"), "must be positive"),
        ((*GPT, "--failure-hours", "9"), "--failure-hours and --storage need --checkpoints"),
        ((*GPT, "--storage", "1e9"), "--failure-hours and --storage need --checkpoints"),
        ((*GPT, "--longest", "-1"), "longest_s must be positive, not -1"),
        ((*GPT, "--headroom", "10"), "headroom must be at least 0 and under 1, not 10"),
        ((*GPT, "--pareto", "--longest", "9"), "--longest: of a search for the best layouts"),
        ((*GPT, "--pareto", "--keep", "3"), "--keep: of a search for the best layouts"),
        ((*GPT, "--scaling", "--objective", "cost"), "leave --scaling out"),
        ((*GPT, "--layout", "dp=16", "--keep", "3"), "leave --layout out"),
        ((*GPT, "--pareto", "--scaling"), "state one of them"),
        ((*GPT, "--layout", "tp=16,tensor=2d"), "tensor = 2d is not predicted"),
        (("--calibrate", "a.txt", "--seq", "8"), "--calibrate does not go with --seq"),
    ],
)
def test_refusals_of_modes(arguments: tuple[str, ...], text: str) -> None:
    code, output = plan(*arguments)
    assert code == 2
    assert text in " ".join(output.replace("│", " ").split())


def test_recommendation_models() -> None:
    code, output = plan(*CLICKS, "--explain", "--json", "out.json", "--save", "layout.json")
    assert code == 0, output
    for text in ("39,884,406", "replicated", "exchange of sums", "samples/s"):
        assert text in output
    layouts = json.loads(Path("out.json").read_text())["layouts"]
    assert [each["step_s"] for each in layouts] == sorted(each["step_s"] for each in layouts)
    assert layouts[0]["step_s"] == pytest.approx(sum(layouts[0]["time_s"].values()))
    code, output = plan(*CLICKS, "--layout", "layout.json", "--placement", "row", "--json", "one")
    assert code == 0 and json.loads(Path("one").read_text())["layouts"][0]["placed_by"] == "row"
    dense = plan(*CLICKS, "--table-update", "dense", "--json", "dense.json")
    assert dense[0] == 0
    whole = json.loads(Path("dense.json").read_text())["layouts"][0]
    assert whole["step_s"] > layouts[0]["step_s"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((*CLICKS, "--scaling"), "--scaling is for transformers"),
        ((*CLICKS, "--layout", "tp=8"), "tp = 8 does not divide a recommendation model"),
        ((*CLICKS, "--seq", "128"), "seq = 128; seq = 1 works"),
        ((*CLICKS, "--seq", "0"), "seq must be at least 1, not 0"),
        ((*CLICKS, "--placement", "row", "--objective", "memory"), "leave --placement out"),
        *(
            ((*CLICKS, *option), f"{option[0]} is for transformers")
            for option in (
                ("--trainable", "lora:8"),
                ("--document", "64"),
                ("--padding", "0.1"),
                ("--offload",),
                ("--headroom", "0.2"),
                ("--context", "ulysses"),
                ("--schedules", "zbv"),
                ("--price", "2"),
            )
        ),
        ((*GPT, "--placement", "row"), "--placement is for recommendation models"),
        ((*GPT, "--table-update", "dense"), "--table-update is for recommendation models"),
    ],
)
def test_refusals_of_recommendation_models(arguments: tuple[str, ...], text: str) -> None:
    code, output = plan(*arguments)
    assert code == 2
    assert text in " ".join(output.replace("│", " ").split())

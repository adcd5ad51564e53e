from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unisono.algorithms import build, names
from unisono.commands.main import app
from unisono.schedule import Builder, Collective, to_json
from unisono.types import Op


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def show(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["show", *arguments], env={"COLUMNS": "150"})
    return result.exit_code, result.output


def test_show_prints_a_table_and_writes_both_drawings() -> None:
    code, output = show("all_reduce", "ring", "-n", "8", "--size", "64M")
    assert code == 0
    assert "0→1: 7+" in output and "a rank sends 112 MiB" in output
    assert {path.name for path in Path.cwd().iterdir()} == {
        "all_reduce-ring-8.svg",
        "all_reduce-ring-8.html",
    }
    assert "written: all_reduce-ring-8.svg" in output
    assert "written: all_reduce-ring-8.html" in output


@pytest.mark.parametrize(
    ("options", "files"),
    [
        (("--no-files",), set()),
        (("--svg", "x.svg"), {"x.svg"}),
        (("--html", "x.html", "--layout", "line"), {"x.html"}),
        (("--svg", "x.svg", "--html", "y.html"), {"x.svg", "y.html"}),
        (("-n", "200"), set()),
    ],
)
def test_only_requested_files_are_written(options: tuple[str, ...], files: set[str]) -> None:
    assert show("broadcast", "direct", *options)[0] == 0
    assert {path.name for path in Path.cwd().iterdir()} == files


def test_a_schedule_from_a_file_is_drawn_like_its_algorithm() -> None:
    schedule = build("gather", "binomial_tree", ranks=5, root=2)
    Path("mine.json").write_text(to_json(schedule))
    code, output = show("mine.json", "--json", "again.json")
    assert code == 0
    assert Path("mine.svg").exists() and Path("mine.html").exists()
    assert show("again.json", "--no-files")[1] in output
    direct = show("gather", "binomial_tree", "-n", "5", "--root", "2", "--no-files")[1]
    assert direct in output


def test_json_on_standard_output_is_only_json() -> None:
    result = CliRunner().invoke(
        app, ["show", "all_gather", "ring", "-n", "3", "--no-files", "--json", "-"]
    )
    found = json.loads(result.stdout)
    assert [row["round"] for row in found["rounds"]] == [0, 1]
    assert "all_gather by ring" in result.stderr


def test_a_wrong_schedule_is_drawn_with_its_error() -> None:
    b = Builder(Collective(op=Op.BROADCAST, ranks=3, root=0), "mine")
    b.copy(0, 0, 1)
    Path("wrong.json").write_text(to_json(b.build()))
    code, output = show("wrong.json")
    assert code == 1
    assert "WRONG" in output and "rank 2, chunk 0" in output
    assert "rank 2, chunk 0" in Path("wrong.svg").read_text()


@pytest.mark.parametrize("op", list(Op))
def test_an_operation_alone_lists_its_algorithms_with_their_costs(op: Op) -> None:
    code, output = show(op, "-n", "6", "--json", "list.json")
    assert code == 0
    listed = json.loads(Path("list.json").read_text())["algorithms"]
    assert tuple(found["name"] for found in listed) == names(op)
    first_words = [line.split()[0] for line in output.splitlines() if line.strip()]
    for found in listed:
        assert found["name"] in first_words
        assert (found["rounds"] is None) == bool(found["problem"])
    assert {path.name for path in Path.cwd().iterdir()} == {"list.json"}


def test_listed_costs_are_for_these_ranks_and_this_size() -> None:
    output = show("all_reduce", "-n", "8", "--size", "64M")[1]
    ring = next(line for line in output.splitlines() if line.startswith("ring"))
    assert ring.split("│")[1].strip() == "14" and "112 MiB" in ring


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (("allreduce", "ring"), "neither a file nor one of the operations"),
        (("all_reduce", "rings"), "has no algorithm"),
        (("all_reduce", "ring", "-n", "400"), "use fewer ranks"),
        (("broadcast", "direct", "--root", "8"), "expected a root in 0..7, got 8"),
        (("all_reduce", "ring", "--size", "8Q"), "not a size"),
        (("all_reduce", "ring", "--svg", "x.png"), "must end in .svg"),
        (("all_reduce", "ring", "--layout", "star"), "auto, circle, grid, line"),
        (("all_reduce", "ring", "-n", "129", "--html", "x.html"), "at most 128 ranks"),
        (("all_reduce", "ring", "--svg", "."), "Is a directory"),
        (("all_reduce", "ring", "--root", "1"), "all_reduce has no root"),
        (("all_reduce", "--all"), "needs an algorithm"),
        (("all_reduce", "ring", "--no-files", "--open"), "needs a drawing"),
        ((".",), "cannot be read: Is a directory"),
    ],
)
def test_invalid_options_are_refused_and_write_no_files(wrong: tuple[str, ...], says: str) -> None:
    code, output = show(*wrong)
    assert code == 2
    assert says in " ".join(output.replace("│", " ").split())
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("1f1b", "ring"), "a pipeline schedule has no algorithm ring"),
        (("1f1b", "--html", "x.html"), "--html: does not apply to a pipeline schedule"),
        (("zbv", "--vpp", "2"), "--vpp: zbv always has two stages per rank"),
        (("zbv", "-n", "4", "--microbatches", "2"), "needs at least 4 microbatches, not 2"),
        (("1f1b", "--forward", "soon"), "expected a time such as"),
        (("all_reduce", "ring", "--vpp", "2"), "--vpp: needs a pipeline schedule"),
    ],
)
def test_refusals_of_pipelines(arguments: tuple[str, ...], error: str) -> None:
    code, output = show(*arguments)
    assert code == 2 and error in " ".join(output.replace("│", " ").split())

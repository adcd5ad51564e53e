from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from timeline.scripted_timeline import phase, scripted_writer
from unisono.commands.main import app
from unisono.timeline import TimelineWriter


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNISONO_TIMELINE_DIR", str(tmp_path / "timelines"))


@pytest.fixture
def timelines(here: None) -> list[TimelineWriter]:
    events = [*phase("forward", 1, 0, 10), *phase("backward", 1, 10, 30)]
    folder = Path("timelines")
    return [scripted_writer(folder, events, rank=r, size=3, job="j") for r in (0, 2)]


def trace(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["trace", *arguments], env={"COLUMNS": "200"})
    error = "" if result.exception is None else str(result.exception)
    return result.exit_code, " ".join((result.output + error).replace("│", " ").split())


def test_a_process_is_read_by_its_number_or_with_all(timelines: list[TimelineWriter]) -> None:
    for source in (str(os.getpid()), "--all"):
        code, said = trace(source)
        assert code == 0
        assert "written: trace.json (ranks 0, 2) missing: ranks 1" in said
        found = json.loads(Path("trace.json").read_text())
        assert sum(event["name"] == "forward" for event in found["traceEvents"]) == 2
        Path("trace.json").unlink()


def test_traces_may_be_compressed(timelines: list[TimelineWriter]) -> None:
    assert trace("--all", "-o", "t.json.gz")[0] == 0
    assert "traceEvents" in json.loads(gzip.decompress(Path("t.json.gz").read_bytes()))


def test_dumps_merge_and_have_a_summary(timelines: list[TimelineWriter]) -> None:
    assert trace("--all", "--output", "all.dump")[0] == 0
    code, said = trace("merge", "all.dump", "-o", "merged.json")
    assert code == 0 and "missing: ranks 1" in said
    code, said = trace("summary", "all.dump", "--json", "s.json")
    assert code == 0
    assert "median ms of 1 steps, 3 ranks" in said
    assert "30.00" in said and "missing: ranks 1" in said
    [job] = json.loads(Path("s.json").read_text())["jobs"]
    assert [each["rank"] for each in job["steps"][0]["ranks"]] == [0, 2]


def test_a_kept_file_is_a_source(timelines: list[TimelineWriter]) -> None:
    assert trace("summary", str(timelines[0].path))[0] == 0
    assert trace(str(timelines[0].path), "-o", "one.json")[0] == 0


@pytest.mark.parametrize(
    ("wrong", "code", "says"),
    [
        ((), 2, "Usage"),
        (("read",), 2, "or else --all"),
        (("1", "--all"), 2, "or else --all"),
        (("1",), 1, "process 1 has no timeline"),
        (("summary", "none.dump"), 2, "none.dump: cannot be read"),
        (("merge", "bad.dump"), 2, "another file"),
        (("--all", "-o", "x.dump", "--torch", "bad.dump"), 2, "when you merge"),
        (("--all", "--torch", "bad.dump"), 2, "expected a trace of torch"),
    ],
)
def test_wrong_arguments_are_refused(
    timelines: list[TimelineWriter], wrong: tuple[str, ...], code: int, says: str
) -> None:
    Path("bad.dump").write_text("x")
    found, said = trace(*wrong)
    assert found == code and says in said


def test_no_timeline_at_all_is_explained() -> None:
    code, said = trace("--all")
    assert code == 1 and "once it makes a Controller" in said

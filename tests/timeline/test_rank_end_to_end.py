"""Two ranks train while another process reads their timelines. Then one rank is killed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ranks import Me, Processes
from unisono.chrome_trace import nesting_faults
from unisono.commands.main import app
from unisono.timeline import CONTROLLER_THREAD, RankDump, find_files, spans_of

pytest.importorskip("torch")

RANKS = 2
STEPS = 12


def train_until_killed(me: Me) -> None:
    import torch

    from unisono.errors import CommunicationError
    from unisono.parallel import data_parallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    comm = me.join()
    layers = [torch.nn.Linear(32, 32) for _ in range(4)]
    model = data_parallel(torch.nn.Sequential(*layers), comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.full((8, 32), comm.rank + 1.0)
    step = 0
    try:
        while True:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            step += 1
            if step == STEPS:
                me.say("trained", pid=os.getpid())
            if step > STEPS:
                # makes steps slow, so that the test can read the timeline while training continues
                time.sleep(0.01)
    except CommunicationError as error:
        me.say("failed", error=type(error).__name__)
        time.sleep(60)  # keeps the process alive while the test reads its timeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("timelines")


@pytest.fixture(autouse=True)
def same_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TIMELINE_DIR", str(folder))


@pytest.fixture(scope="module")
def job(folder: Path) -> Iterator[Processes]:
    environment = {"UNISONO_TIMELINE_DIR": str(folder)}
    modules = ["torch._dynamo", "unisono.parallel.data_parallelism"]  # each rank imports these
    with Processes(
        train_until_killed, RANKS, environment=lambda _: environment, modules=modules
    ) as processes:
        processes.wait_for("trained", range(RANKS), timeout_s=100)
        yield processes


def trace(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["trace", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def pids(job: Processes) -> list[str]:
    return [str(facts["pid"]) for facts in job.wait_for("trained", range(RANKS))]


def test_the_trace_of_a_running_job_has_all_phases_of_all_ranks(
    job: Processes, tmp_path: Path
) -> None:
    output = tmp_path / "trace.json"
    code, said = trace(*pids(job), "-o", str(output))
    assert code == 0 and f"written: {output} (ranks 0, 1)" in said, said
    found = json.loads(output.read_text())
    assert nesting_faults(found["traceEvents"]) == []
    assert found["otherData"]["missing_ranks"] == []
    for rank in range(RANKS):
        mine: list[dict[str, Any]] = [e for e in found["traceEvents"] if e["pid"] == rank]
        for name in ("forward", "backward", "optimizer"):
            assert sum(e["name"] == name and e["ph"] == "X" for e in mine) >= STEPS - 1
        assert sum(e.get("cat") == "collectives" for e in mine) >= STEPS - 1
        names = {e["name"] for e in mine if e.get("cat") == "tensor" and e["ph"] == "b"}
        assert {f"{i}.weight" for i in range(4)} <= names


def test_every_step_is_whole_and_in_order(job: Processes) -> None:
    for file in find_files():
        spans = spans_of(RankDump.parse(file.path.read_bytes()))
        phases = [each for each in spans.phases if each.step <= STEPS]
        assert [(each.name, each.step) for each in phases] == [
            (name, step)
            for step in range(1, STEPS + 1)
            for name in ("forward", "backward", "optimizer")
        ]
        assert all(a.when.ended_ns <= b.when.begun_ns for a, b in itertools.pairwise(phases))
        done = [each for each in spans.collectives if each.moved is not None]
        for each in done:
            assert each.done_ns is not None
            assert each.launched_ns <= each.moved.begun_ns <= each.moved.ended_ns <= each.done_ns
        per_step = {each.name for each in spans.tensors}
        assert len([e for e in spans.tensors if e.name == "0.weight"]) >= STEPS
        assert "gradient flags" in per_step
        assert any(wait.thread != CONTROLLER_THREAD for wait in spans.waits)


def test_the_summary_of_a_running_job(job: Processes) -> None:
    code, said = trace("summary", "--all", "--json", "-")
    assert code == 0, said
    found = json.loads(CliRunner().invoke(app, ["trace", "summary", "--all", "--json", "-"]).stdout)
    [summary] = found["jobs"]
    assert summary["size"] == RANKS and summary["missing_ranks"] == []
    steps = [each for each in summary["steps"] if len(each["ranks"]) == RANKS]
    assert len(steps) >= STEPS - 1
    for step in steps:
        for each in step["ranks"]:
            assert 0 < each["compute_s"] < each["step_s"]
            assert each["communication_s"] > 0
            parts = each["hidden_s"] + each["exposed_s"]
            assert parts == pytest.approx(each["communication_s"])
            assert sum(each["phases_s"].values()) + each["waited_s"] == pytest.approx(
                each["step_s"]
            )


def test_dumps_of_two_hosts_merge(job: Processes, tmp_path: Path) -> None:
    first, second = pids(job)
    for name, pid in (("a", first), ("b", second)):
        assert trace(pid, "-o", str(tmp_path / f"{name}.dump"))[0] == 0
    code, said = trace(
        "merge", str(tmp_path / "a.dump"), str(tmp_path / "b.dump"), "-o", str(tmp_path / "t.json")
    )
    assert code == 0, said
    assert len(json.loads((tmp_path / "t.json").read_text())["otherData"]["ranks"]) == RANKS
    code, said = trace("summary", str(tmp_path / "a.dump"))
    assert code == 0 and "missing: ranks 1" in said


def test_a_killed_rank_and_its_survivor_are_read(job: Processes, tmp_path: Path) -> None:
    """Kills a rank. This must be the last test, since it ends the job."""
    first, second = pids(job)
    job.signal(1, signal.SIGKILL)
    [failed] = job.wait_for("failed", [0])
    assert failed["error"] == "PeerLostError"
    output = tmp_path / "trace.json"
    code, said = trace("--all", "-o", str(output))
    assert code == 0 and "(ranks 0, 1)" in said, said
    found = json.loads(output.read_text())
    assert nesting_faults(found["traceEvents"]) == []
    survivor, killed = found["otherData"]["ranks"]
    assert survivor["failure"].startswith("PeerLostError") and killed["failure"] == ""
    assert (str(survivor["process"]), str(killed["process"])) == (first, second)
    assert any(e["name"] == "PeerLostError" and e["ph"] == "i" for e in found["traceEvents"])

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unisono.commands import train, train_packages
from unisono.errors import UnisonoError, UnsupportedError
from unisono.train import events
from unisono.train.settings import TrainingRun


def fake_launch(
    run: TrainingRun, listen: Callable[[events.Event], None]
) -> list[events.BackendFinished]:
    """Simulates a launch without training; the losses of the backend named `bad` are wrong."""
    steps = run.periods * (run.steps_per_period or 22)
    listen(events.Started(total_steps=steps, parameters=1024))
    for backend in run.backends:
        listen(events.Stepped(backend=backend, step=1, loss=1.0))
        listen(events.Scored(backend=backend, period=1, score=0.5))
    listen(events.Measuring())
    results = [result(run, backend, steps) for backend in run.backends]
    for one in results:
        listen(one)
    return results


def result(run: TrainingRun, backend: str, steps: int) -> events.BackendFinished:
    wrong = 0.1 if backend == "bad" else 0.0
    return events.BackendFinished(
        backend=backend,
        score=0.99,
        losses=[1.0 / (1 + step) + wrong for step in range(steps)],
        step_s=[0.01] * steps,
        exchange_s=[0.001],
        synced_s=[0.008],
        unsynced_s=[0.006],
        bucket_bytes=[4096],
        same_parameters=True,
        sample="def f(): ..." if run.task == "text" else "",
    )


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "launch", fake_launch)
    monkeypatch.setattr(train_packages.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(train.signal, "signal", lambda number, handler: None)


def call(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(train.app, arguments, env={"COLUMNS": "120"})
    return result.exit_code, result.stdout, result.stderr


def test_digits_compares_backends(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    status, printed, _ = call("digits", "--backends", "unisono,gloo", "--json", str(path))
    assert status == 0
    assert "550 steps" in printed and "unisono" in printed and "gloo" in printed
    assert "the loss curves of unisono and gloo agree" in " ".join(printed.split())
    runs = json.loads(path.read_text())["runs"]
    assert [run["backend"] for run in runs] == ["unisono", "gloo"]


def test_json_is_alone_on_stdout() -> None:
    status, stdout, stderr = call("text", "--backends", "gloo", "--steps", "50", "--json", "-")
    assert status == 0
    assert json.loads(stdout)["settings"]["task"] == "text"
    assert "def f(): ..." in stderr


def test_disagreement_fails() -> None:
    status, printed, _ = call("digits", "--backends", "gloo,bad")
    assert status == 1
    assert "FAILED" in printed and "DISAGREE" in printed


def test_a_failed_run_prints_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: TrainingRun, listen: object) -> list[events.BackendFinished]:
        raise UnisonoError("rank 1 [died]")

    monkeypatch.setattr(train, "launch", fail)
    status, _, stderr = call("digits", "--backends", "gloo")
    assert status == 1
    assert stderr.splitlines()[-1] == "unisono: rank 1 [died]"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_packages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="needs torch and scikit-learn, not installed here"):
        CliRunner().invoke(train.app, ["digits"], catch_exceptions=False)


@pytest.mark.parametrize("backends", ["", "gloo,gloo"])
def test_backends_must_differ(backends: str) -> None:
    status, _, _ = call("digits", "--backends", backends)
    assert status == 2


@pytest.mark.parametrize("name", ["digits", "text"])
def test_help_has_an_example(name: str) -> None:
    status, printed, _ = call(name, "--help")
    assert status == 0
    assert f"Example: unisono train {name}" in printed


@pytest.mark.parametrize("name", ["digits", "dlrm"])
def test_dropout_is_for_transformers(name: str) -> None:
    status, _, stderr = call(name, "-n", "1", "--layout", "dp=1", "--dropout", "0.1")
    assert status == 2
    assert "--dropout is for transformers" in stderr


def test_a_pipeline_schedule_needs_a_pipeline() -> None:
    status, _, stderr = call("text", "-n", "2", "--layout", "dp=2", "--schedule-json", "x.json")
    assert status == 2
    assert "--schedule-json needs a pipeline" in stderr


@pytest.mark.parametrize(
    ("text", "expected"), [("dp2", "'dp2'"), ("gone.json", "gone.json: cannot be read")]
)
def test_a_mistyped_layout_is_no_missing_file(text: str, expected: str) -> None:
    status, _, stderr = call("text", "-n", "2", "--layout", text)
    assert status == 2
    assert expected in stderr
    assert ("NAME=NUMBER" in stderr) == (text == "dp2")

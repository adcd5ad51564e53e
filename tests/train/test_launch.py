from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from unisono.errors import UnisonoError
from unisono.train import events
from unisono.train.launch import launch
from unisono.train.settings import Run

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def a_run(*backends: str) -> Run:
    return Run(
        task="digits",
        backends=backends,
        ranks=2,
        seed=0,
        batch=16,
        periods=2,
        steps_per_period=3,
        learning_rate=0.1,
        measured_groups=2,
    )


def test_two_ranks_train_and_report(folder: Path) -> None:
    heard: list[events.Event] = []
    (finished,) = launch(a_run("gloo"), heard.append)
    assert [type(event).__name__ for event in heard if not isinstance(event, events.Stepped)] == [
        "Started",
        "Scored",
        "Scored",
        "Measuring",
        "Finished",
    ]
    assert heard[-1] == finished
    assert len(finished.losses) == len(finished.step_s) == 6
    assert len(finished.exchange_s) == len(finished.synced_s) == len(finished.unsynced_s) == 2
    assert all(time_s > 0 for time_s in finished.exchange_s + finished.synced_s)
    assert sum(finished.bucket_bytes) == 4 * 283_786
    assert finished.same_parameters
    assert 2.0 < finished.losses[0] < 2.6
    assert list(folder.iterdir()) == []


def test_a_failing_rank_is_quoted(folder: Path) -> None:
    with pytest.raises(UnisonoError, match="no_such_backend") as caught:
        launch(a_run("no_such_backend"), lambda event: None)
    assert "training on no_such_backend failed" in str(caught.value)
    assert list(folder.iterdir()) == []


def test_backends_take_turns_in_one_job() -> None:
    heard: list[events.Event] = []
    finished = launch(a_run("unisono", "gloo"), heard.append)
    turns = [event.backend for event in heard if isinstance(event, events.Scored)]
    assert turns == ["unisono", "gloo", "gloo", "unisono"]
    assert [one.backend for one in finished] == ["unisono", "gloo"]
    assert finished[0].losses == pytest.approx(finished[1].losses, abs=1e-5)
    assert all(one.same_parameters for one in finished)

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from unisono.errors import UnisonoError
from unisono.train import events
from unisono.train.rank_launch import _cause, launch
from unisono.train.settings import TrainingRun

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder in which the tests make temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def a_run(*backends: str) -> TrainingRun:
    return TrainingRun(
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


def test_backends_and_the_controller_alternate_in_one_job(folder: Path) -> None:
    received: list[events.Event] = []
    finished = launch(a_run("controller", "unisono", "gloo"), received.append)
    milestones = [event for event in received if not isinstance(event, events.Stepped)]
    assert [(type(event).__name__, getattr(event, "backend", "")) for event in milestones] == [
        ("Started", ""),
        ("Scored", "controller"),
        ("Scored", "unisono"),
        ("Scored", "gloo"),
        ("Scored", "gloo"),
        ("Scored", "unisono"),
        ("Scored", "controller"),
        ("Measuring", ""),
        ("BackendFinished", "controller"),
        ("BackendFinished", "unisono"),
        ("BackendFinished", "gloo"),
    ]
    assert finished == received[-3:]
    assert list(folder.iterdir()) == []
    for one in finished:
        assert len(one.losses) == len(one.step_s) == 6
        assert 2.0 < one.losses[0] < 2.6
        assert len(one.exchange_s) == 2
        assert len(one.synced_s) == len(one.unsynced_s) == 8
        assert all(time_s > 0 for time_s in one.exchange_s + one.synced_s + one.unsynced_s)
        assert sum(one.bucket_bytes) == 4 * 283_786
        assert one.same_parameters
        assert one.losses == pytest.approx(finished[0].losses, abs=1e-5)


def test_a_failing_rank_is_quoted(folder: Path) -> None:
    with pytest.raises(UnisonoError, match="no_such_backend") as caught:
        launch(a_run("no_such_backend"), lambda event: None)
    assert str(caught.value).startswith("training on no_such_backend failed (exit status 1): ")
    assert "\n" not in str(caught.value)
    assert "Traceback" in "".join(caught.value.__notes__)
    assert list(folder.iterdir()) == []


def test_the_cause_of_a_failed_run() -> None:
    trace = "Traceback (most recent call last):\n  x.raise_Error: 3\n"
    lost = "unisono.errors.PeerLostError: rank 1 is gone"
    summary = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n exitcode  : {}"
    output = f"{trace}{lost}\n[rank1]: {trace}[rank1]: KeyError: 'x'\n{summary.format(1)}"
    assert _cause(output) == "KeyError: 'x'"
    assert _cause(f"{trace}{lost}\n") == lost
    assert _cause(summary.format(-9)) == "a rank ended with exit code -9"
    assert _cause("") == "the ranks gave no reason"


KILLED_AT_ONCE = """
import os, signal, sys
from unisono.train import rank_launch
sleep = [sys.executable, "-c", "print(0, flush=True); import time; time.sleep(100)"]
with rank_launch._started(sleep, sys.stdout) as process:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_end_when_the_program_is_killed() -> None:
    # The output ends only after all processes that can write to it have ended.
    command = [sys.executable, "-c", KILLED_AT_ONCE]
    done = subprocess.run(command, capture_output=True, timeout=110, check=False)
    assert done.returncode == -signal.SIGKILL

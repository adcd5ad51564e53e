"""Trainings whose agent and ranks are forked from a process that has imported torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

import pytest

pytest.importorskip("torch")

from unisono.train import rank_launch, rank_starter
from worlds.forked_program import start_program


class Agent:
    """A forked agent, with what `rank_launch` uses of `subprocess.Popen`."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode


@pytest.fixture
def forked_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks the agent of each training. `test_launch.py` starts agents as users do."""
    monkeypatch.setattr(rank_launch, "_started", _started)


@contextlib.contextmanager
def _started(arguments: list[str], log: TextIO) -> Iterator[Agent]:
    words = arguments[arguments.index("unisono.train.rank_starter") + 1 :]
    path = Path(rank_starter.__file__)
    process = start_program(path, *words, folder=Path(os.getcwd()), log=Path(log.name))
    try:
        yield Agent(process)
    finally:
        process.terminate()
        process.join()

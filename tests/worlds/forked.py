"""Ranks that use torch, forked from a process that has imported torch, since each import takes
seconds.

The process has only imported modules, so a forked rank begins like a new interpreter. A rank is
given as a function and its file, since a new process cannot import test files by name.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_IMPORTED = (
    "numpy", "pytest", "sklearn.datasets", "torch", "torch._dynamo", "torch.distributed.checkpoint",
    "torch.distributed.device_mesh", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel", "torch.testing",
    "transformers.models.llama.modeling_llama", "unisono.parallel.run",
    "unisono.torch_backend.process_group", "unisono.train.layout_worker",
)  # fmt: skip
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

_HANGS_S = 100.0
"""Seconds after which ranks are killed; less than the time limit of a test."""

multiprocessing.get_context("forkserver").set_forkserver_preload(list(_IMPORTED))


class Fork(ForkServerProcess):
    """A forked process with its own environment, whose output goes to the end of a file."""

    def __init__(self, *, log: Path, environment: dict[str, str], **options: Any) -> None:
        super().__init__(**options)
        self._log, self._environment = log, environment

    def run(self) -> None:
        gc.freeze()  # otherwise collections visit what was imported
        with self._log.open("a") as out:
            for standard in (sys.stdout, sys.stderr):
                os.dup2(out.fileno(), standard.fileno())
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


@contextlib.contextmanager
def _rank_environment() -> Iterator[None]:
    """Sets the variables of ranks. OpenMP reads its own once, when the process that forks ranks
    imports torch: ranks with a thread for each core would wait for each other in loops.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


def start(
    file: str, function: str, *words: object, log: Path, environment: dict[str, str] | None = None
) -> BaseProcess:
    """Starts `function(*words)` of a file as a process whose output goes to the file `log`."""
    with _rank_environment():
        here = {**os.environ, **(environment or {})}
        process = Fork(target=_rank, args=(file, function, words), log=log, environment=here)
        process.start()
    return process


def start_ranks(
    file: str, function: str, ranks: int, *words: object, folder: Path
) -> list[BaseProcess]:
    """Starts `function(rank, *words, folder)` of a file on each rank. The folder contains the
    ranks' logs.
    """
    return [
        start(file, function, rank, *words, folder, log=folder / f"{rank}.log")
        for rank in range(ranks)
    ]


def join_all(processes: Sequence[BaseProcess]) -> None:
    """Waits for the processes, and kills the processes that do not end.

    The first rank of a test run waits until torch is imported. The limit is longer than the
    timeouts of the ranks' groups (60 s), so that ranks report a timeout themselves.
    """
    deadline = time.monotonic() + _HANGS_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
        process.kill()
        process.join()


def kill_last(processes: Sequence[BaseProcess], *, alive_s: float = 0.0) -> float:
    """Kills the last process after `alive_s` seconds, and waits for all processes. Returns the time
    of the kill.
    """
    time.sleep(alive_s)
    processes[-1].kill()
    killed = time.time()
    join_all(processes)
    return killed


def load(file: str) -> ModuleType:
    """Imports a test file as a module in a rank's process."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _rank(file: str, function: str, words: tuple[object, ...]) -> None:
    getattr(load(file), function)(*words)


# ---- processes that start processes


def run_file(path: str) -> None:
    """Runs a file in this process, as the command `python` does."""
    runpy.run_path(path, run_name="__main__")


def server() -> dict[str, Any]:
    """Returns what a forked process must know to fork further processes from the same process."""
    with _rank_environment():
        forkserver.ensure_running()
    known = ("_forkserver_address", "_forkserver_authkey")
    return {name: each for name, each in vars(forkserver._forkserver).items() if name in known}


def use(server: dict[str, Any]) -> None:
    """Forks from this `server()`. A process would otherwise start its own, which imports torch."""
    vars(forkserver._forkserver).update(server, ensure_running=lambda: None)
    forkserver.ensure_running = lambda: None

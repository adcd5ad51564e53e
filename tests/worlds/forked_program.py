"""Runs a program and its ranks in processes forked from a process that has imported torch.

The program runs as it does for a user, but `unisono.run` and torch's elastic agent also fork their
ranks instead of starting new interpreters. `tests/launch/test_local_ranks.py` and
`tests/torch_backend/test_torchrun_nodes.py` test ranks in new interpreters.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.context import BaseContext, ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from worlds import forked


def run_program(path: Path, *arguments: str, folder: Path, log: Path, timeout_s: float) -> str:
    """Runs a program in a folder until it ends, and returns its output. Raises `AssertionError`
    with the output if it fails.
    """
    return _output(path, start_program(path, *arguments, folder=folder, log=log), log, timeout_s)


def torchrun(
    path: Path,
    *arguments: str,
    ranks: int,
    restarts: int,
    folder: Path,
    log: Path,
    timeout_s: float,
) -> str:
    """Runs a program as `torchrun --standalone` does. Returns the output as `run_program` does."""
    words = (path, arguments, ranks, restarts, folder, log, forked.server())
    return _output(path, forked.start(__file__, "elastic", *words, log=log), log, timeout_s)


def start_program(path: Path, *arguments: str, folder: Path, log: Path) -> BaseProcess:
    """Starts a program in a folder. Its output goes to the file `log`."""
    words = (path, arguments, folder, log, forked.server())
    return forked.start(__file__, "program", *words, log=log)


def _output(path: Path, process: BaseProcess, log: Path, timeout_s: float) -> str:
    process.join(timeout_s)
    code = process.exitcode
    process.kill()
    process.join()
    output = log.read_text()
    assert code == 0, f"{path}: exit code {code}\n{output}"
    return output


def program(
    path: Path, arguments: Sequence[str], folder: Path, log: Path, server: dict[str, Any]
) -> None:
    """Runs the program in this process, as the command `python` does."""
    with _forks(path, arguments, folder, log, server):
        forked.run_file(str(path))


def elastic(
    path: Path,
    arguments: Sequence[str],
    ranks: int,
    restarts: int,
    folder: Path,
    log: Path,
    server: dict[str, Any],
) -> None:
    """Runs the program on ranks that torch's elastic agent starts."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=secrets.token_hex(8),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    with _forks(path, arguments, folder, log, server):
        elastic_launch(config, forked.run_file)(str(path))


@contextlib.contextmanager
def _forks(
    path: Path, arguments: Sequence[str], folder: Path, log: Path, server: dict[str, Any]
) -> Iterator[None]:
    """Runs a program's body in a folder. Its processes are forked where they would be spawned."""
    forked.use(server)
    original = multiprocessing.get_context

    class Forks(ForkServerContext):
        @staticmethod
        def Process(**options: Any) -> forked.Fork:
            return forked.Fork(log=log, environment=dict(os.environ), **options)

    def get_context(kind: str | None = None) -> BaseContext:
        return Forks() if kind in ("spawn", "forkserver") else original(kind)

    multiprocessing.get_context = get_context  # type: ignore[assignment]
    sys.path[0:0] = [str(path.parent)]
    sys.argv[:] = [str(path), *arguments]
    with contextlib.chdir(folder):
        yield

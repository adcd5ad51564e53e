"""Runs a program and its ranks in processes forked from a process that has imported torch.

The program runs as it does for a user, but `unisono.run` also forks its ranks instead of starting
new interpreters. `tests/communicator/test_launch.py` tests ranks in new interpreters.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import runpy
import sys
from collections.abc import Callable
from multiprocessing.context import BaseContext
from pathlib import Path

from torch_backend.forked import start


def run_program(path: Path, *, folder: Path, log: Path, timeout_s: float) -> None:
    """Runs a program in a folder until it ends. Raises `AssertionError` with the program's output
    if it fails.
    """
    process = start(__file__, "program", path, folder, log=log)
    process.join(timeout_s)
    code = process.exitcode
    process.kill()
    process.join()
    assert code == 0, f"{path}: exit code {code}\n{log.read_text()}"


def program(path: Path, folder: Path) -> None:
    """Runs the program in this process, as the command `python` does."""
    multiprocessing.get_context = functools.partial(  # type: ignore[assignment]
        _context, multiprocessing.get_context
    )
    sys.path[0:0] = [str(path.parent)]
    sys.argv[:] = [str(path)]
    with contextlib.chdir(folder):
        runpy.run_path(str(path), run_name="__main__")


def _context(original: Callable[[str | None], BaseContext], kind: str | None = None) -> BaseContext:
    return original("forkserver" if kind == "spawn" else kind)

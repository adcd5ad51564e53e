"""Runs a program in a process that is forked from one that has imported torch, as its ranks are.

The program runs as it does for a user, except that `unisono.run` forks its ranks too, instead of
starting new interpreters. `tests/communicator/test_launch.py` tests those.
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
    """Runs a program in a folder to its end. Raises `AssertionError` with its output if it
    fails.
    """
    process = start(__file__, "program", path, folder, log=log)
    process.join(timeout_s)
    code = process.exitcode
    process.kill()
    process.join()
    assert code == 0, f"{path}: exit code {code}\n{log.read_text()}"


def program(path: Path, folder: Path) -> None:
    """Runs the program as `python` does, in this process."""
    multiprocessing.get_context = functools.partial(  # type: ignore[assignment]
        _context, multiprocessing.get_context
    )
    sys.path[0:0] = [str(path.parent)]
    sys.argv[:] = [str(path)]
    with contextlib.chdir(folder):
        runpy.run_path(str(path), run_name="__main__")


def _context(original: Callable[[str | None], BaseContext], kind: str | None = None) -> BaseContext:
    return original("forkserver" if kind == "spawn" else kind)

"""Start the ranks of a job under torchrun and listen to rank 0."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from unisono.errors import UnisonoError
from unisono.temporary_folders import Scratch
from unisono.train import events
from unisono.train.settings import Run

_POLL_S = 0.1
_LEAVE_S = 45.0  # torchrun itself gives its ranks 30 s
_LOG_LINES = 40
_PR_SET_PDEATHSIG = 1


def launch(run: Run, listen: Callable[[events.Event], None]) -> list[events.Finished]:
    """Run to the end; `listen` gets every event as it comes. One result for each backend.

    Raises UnisonoError, with the last lines of the ranks' output, when a rank fails.
    """
    with Scratch("unisono-train-") as folder:
        event_path, log_path = folder / "events", folder / "log"
        event_path.touch()
        with log_path.open("w") as log, _started(command(run, event_path), log) as process:
            finished = []
            for event in _follow(event_path, process):
                listen(event)
                if isinstance(event, events.Finished):
                    finished.append(event)
        if process.returncode != 0 or len(finished) != len(run.backends):
            names = " and ".join(run.backends)
            raise UnisonoError(
                f"training on {names} failed (exit status {process.returncode}); "
                f"the ranks said last:\n{_tail(log_path)}"
            )
    return finished


def command(run: Run, event_path: Path) -> list[str]:
    """The command line of a run; it works by hand as well."""
    return [
        # `env` keeps all of the caller's environment without reading it here. One thread a rank
        # on every backend; Gloo is told the interface, as a host name may resolve to nothing.
        *("env", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo"),
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(run.ranks)),
        # Else torchrun makes a folder of its own, and leaves it.
        *("--log-dir", str(event_path.parent)),
        *("-m", "unisono.train.worker", run.encode(), str(event_path)),
    ]


@contextlib.contextmanager
def _started(arguments: list[str], log: TextIO) -> Iterator[subprocess.Popen[bytes]]:
    """The process, which has ended, with all its ranks, when the context is left."""
    process = subprocess.Popen(
        arguments,
        stdout=log,
        stderr=log,
        stdin=subprocess.DEVNULL,
        # Ctrl-C reaches this process alone: two signals at once would stop torchrun's tidying up.
        start_new_session=True,
        preexec_fn=_end_with_parent,  # noqa: PLW1509 - it makes one system call
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            # torchrun passes SIGTERM on to its ranks, which a kill would leave behind.
            process.terminate()
        try:
            process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_parent() -> None:
    """torchrun is told to end, with its ranks, when this process is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _follow(path: Path, process: subprocess.Popen[bytes]) -> Iterator[events.Event]:
    """Every event written until the process ends."""
    with path.open(encoding="utf-8") as file:
        unfinished = ""
        while True:
            has_ended = process.poll() is not None
            for line in file:
                unfinished += line
                if unfinished.endswith("\n"):
                    yield events.decode(unfinished)
                    unfinished = ""
            if has_ended:
                return
            time.sleep(_POLL_S)


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-_LOG_LINES:])

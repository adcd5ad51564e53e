"""Launches a job on local ranks and reads the events of rank 0."""

from __future__ import annotations

import contextlib
import ctypes
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from unisono.errors import PeerLostError, UnisonoError
from unisono.temporary_folders import TemporaryFolder
from unisono.train import events
from unisono.train.layout_settings import LayoutRun
from unisono.train.settings import TrainingRun

_POLL_S = 0.1
_EXIT_S = 45.0  # longer than torch's agent waits for its ranks (up to 30 s)
_LOG_LINES = 40
_ERROR = re.compile(r"^(?:\[rank\d+\]: *)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$", re.M)
_EXIT_CODE = re.compile(r"exitcode *: *(-?\d+)")
_PR_SET_PDEATHSIG = 1


def launch(
    run: TrainingRun, listen: Callable[[events.Event], None]
) -> list[events.BackendFinished]:
    """Runs a training to its end and returns one result per backend.

    `listen` receives every event immediately. Raises UnisonoError, with the cause in one line
    and the last lines of the ranks' output as a note, if a rank fails.
    """
    finished: list[events.BackendFinished] = []

    def hear(event: events.Event) -> None:
        listen(event)
        if isinstance(event, events.BackendFinished):
            finished.append(event)

    names = " and ".join(run.backends)
    run_ranks(
        "unisono.train.worker",
        run.encode(),
        ranks=run.ranks,
        listen=hear,
        name=f"training on {names}",
        is_complete=lambda: len(finished) == len(run.backends),
    )
    return finished


def launch_layout(run: LayoutRun, listen: Callable[[events.Event], None]) -> dict[str, Any]:
    """Runs a training of one layout to its end; returns the result, as in the file of `--json`.

    `listen` receives every event immediately. Raises ValueError, with the reason in one line, if
    the layout cannot divide the task, and UnisonoError if a rank fails.
    """
    results: list[dict[str, Any]] = []
    refusals: list[str] = []

    def hear(event: events.Event) -> None:
        listen(event)
        if isinstance(event, events.LayoutFinished):
            results.append(event.result)
        elif isinstance(event, events.Refused):
            refusals.append(event.reason)

    run_ranks(
        "unisono.train.layout_worker",
        run.encode(),
        ranks=run.ranks,
        listen=hear,
        name=f"training with {run.layout.text()}",
        is_complete=lambda: bool(results or refusals),
    )
    if refusals:
        raise ValueError(refusals[0])
    return results[0]


def run_ranks(
    worker: str,
    settings: str,
    *,
    ranks: int,
    listen: Callable[[events.Event], None],
    name: str,
    is_complete: Callable[[], bool],
) -> None:
    """Runs a worker module on all ranks to its end.

    `listen` receives every event of rank 0 immediately. Raises UnisonoError, with the cause in one
    line and the last lines of the ranks' output as a note, if a rank fails, or if `is_complete`
    returns False at the end.
    """
    with TemporaryFolder("unisono-train-") as folder:
        event_path, log_path = folder / "events", folder / "log"
        event_path.touch()
        arguments = command(worker, settings, event_path, ranks=ranks)
        with log_path.open("w") as log, _started(arguments, log) as process:
            for event in _follow(event_path, process):
                listen(event)
        if process.returncode != 0 or not is_complete():
            output = log_path.read_text(errors="replace")
            error = UnisonoError(
                f"{name} failed (exit status {process.returncode}): {_cause(output)}"
            )
            error.add_note("\n".join(output.splitlines()[-_LOG_LINES:]))
            raise error


def command(worker: str, settings: str, event_path: Path, *, ranks: int) -> list[str]:
    """Returns the command line that starts a worker on all ranks, for use in a shell too."""
    return [
        # `env` adds to the caller's environment. Each rank computes with one thread, on all
        # backends. Gloo needs the name of the network interface, since the host name may have no
        # address.
        *("env", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo"),
        *(sys.executable, "-m", "unisono.train.rank_starter"),
        *(worker, settings, str(event_path), str(ranks)),
    ]


@contextlib.contextmanager
def _started(arguments: list[str], log: TextIO) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the agent, the parent of the ranks; yields its process.

    At the end of the `with` block, the agent and its ranks have ended.
    """
    process = subprocess.Popen(
        arguments,
        stdout=log,
        stderr=log,
        stdin=subprocess.DEVNULL,
        # In its own session the agent does not get Ctrl-C, which would interrupt its cleanup.
        start_new_session=True,
        preexec_fn=_end_with_parent,  # noqa: PLW1509 - it makes one system call
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            # The agent forwards SIGTERM to its ranks. If it got SIGKILL, its ranks would keep
            # running.
            process.terminate()
        try:
            process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_parent() -> None:
    """Makes the kernel send SIGTERM to the agent if the agent's parent is killed.

    The agent then ends its ranks.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _follow(path: Path, process: subprocess.Popen[bytes]) -> Iterator[events.Event]:
    """Yields every event that the ranks append to the file, until the process ends."""
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


def _cause(output: str) -> str:
    """Returns in one line why a job failed: the first error of a rank. An error about the loss of
    another rank counts only if there is no other.
    """
    found: list[str] = [each for each in _ERROR.findall(output) if "ChildFailedError" not in each]
    if not found:
        codes = _EXIT_CODE.findall(output)
        return f"a rank ended with exit code {codes[0]}" if codes else "the ranks gave no reason"
    return next((each for each in found if PeerLostError.__name__ not in each), found[0])

"""Collects the results of all ranks, or finds the cause of their failure."""

from __future__ import annotations

import multiprocessing.connection
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from unisono.errors import CommunicationError, PeerLostError

GRACE_S = 2.0
"""Seconds that the other ranks have for their reports after the first failure."""


def collect(pipes: Sequence[Connection], lost: Callable[[int], Exception]) -> list[Any]:
    """Returns the results that ranks send through their pipes, in rank order.

    `lost(rank)` returns the error of a rank whose pipe ends without a report. Raises the first
    failure that is not only a consequence of another rank's failure.
    """
    results: dict[int, Any] = {}
    failures: list[tuple[BaseException, str]] = []
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline: float | None = None
    while waiting and (deadline is None or time.monotonic() < deadline):
        left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        for pipe in multiprocessing.connection.wait(list(waiting), left_s):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                good, outcome = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                good, outcome = False, (lost(rank), "")
            if good:
                results[rank] = outcome
            else:
                failures.append(outcome)
                deadline = deadline or time.monotonic() + GRACE_S
    if failures:
        raise _first_cause(failures)
    return [results[rank] for rank in range(len(pipes))]


def ended(rank: int, pid: int | None, code: int | None) -> PeerLostError:
    """Returns the error of a rank whose process ended with this exit code, without a result."""
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = f"signal {signal.Signals(-code).name}"
    return PeerLostError(f"rank {rank} (pid {pid}) ended without a result: {how}")


def _first_cause(failures: Sequence[tuple[BaseException, str]]) -> BaseException:
    causes = [f for f in failures if not isinstance(f[0], CommunicationError)] or failures
    error, trace = causes[0]
    if trace:
        error.add_note(trace)
    return error

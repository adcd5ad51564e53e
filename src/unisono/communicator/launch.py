"""Ranks as processes of this machine: `unisono.run`."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import pickle
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from unisono import config
from unisono.errors import CommunicationError, PeerLostError, UnisonoError

_GRACE_S = 2.0  # what the other ranks get to report after the first failure
_PR_SET_PDEATHSIG = 1


def run(fn: Callable[..., Any], ranks: int = 4, args: Sequence[Any] = ()) -> list[Any]:
    """Calls `fn(*args)` in `ranks` new processes and returns their results by rank.

    `fn` must be picklable; in it, `unisono.init()` joins the group. The ranks import the program,
    so it calls this under `if __name__ == "__main__":`. The first failure of any rank is raised
    here, with that rank's traceback as a note, after the others were ended. Raises `PeerLostError`
    for a rank that ends without a result, `ValueError` for less than one rank or more than 4096.

    >>> import unisono
    >>> unisono.run(max, ranks=2, args=(3, 5))
    [5, 5]
    """
    if not 1 <= ranks <= config.MOST_RANKS:
        raise ValueError(f"a host has 1 to {config.MOST_RANKS} ranks, not {ranks}")
    context = multiprocessing.get_context(_start_method())
    rendezvous = f"run-{secrets.token_hex(16)}"
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            world = config.World(rank=rank, size=ranks, rendezvous=rendezvous)
            process = context.Process(  # type: ignore[attr-defined]
                target=_child, args=(fn, tuple(args), world, theirs), name=f"unisono-rank-{rank}"
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        return _collect(pipes, processes)
    finally:
        _end(processes)
        for pipe in pipes:
            pipe.close()


def _start_method() -> str:
    """New interpreters, unless the program has no file that they could import.

    A rank that is importing this program, and comes to a call that no `if __name__ == "__main__":`
    guards, gets there too: Python then refuses and says so.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return "spawn"
    main = sys.modules["__main__"]
    importable = getattr(main, "__spec__", None) or getattr(main, "__file__", None)
    return "spawn" if importable else "fork"


def _child(
    fn: Callable[..., Any], args: tuple[Any, ...], world: config.World, pipe: Connection
) -> None:
    # The ranks end with the process that started them, however that ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        os._exit(1)  # it had ended before this rank could ask to be told
    config.export(world)
    try:
        pipe.send((True, fn(*args)))
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError):
            pipe.send((False, (_portable(error), f"rank {world.rank}:\n{trace}")))
        if not isinstance(error, Exception):
            raise
    finally:
        pipe.close()


def _portable(error: BaseException) -> BaseException:
    """The error itself if it survives pickling, and does not end whoever raises it."""
    if isinstance(error, SystemExit):
        return UnisonoError(f"the rank called sys.exit({error.code!r})")
    try:
        clone = pickle.loads(pickle.dumps(error))
    except Exception:
        return UnisonoError(f"{type(error).__name__}: {error}")
    return error if type(clone) is type(error) else UnisonoError(str(error))


def _collect(pipes: list[Connection], processes: list[BaseProcess]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[BaseException, str]] = []
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline: float | None = None
    while waiting and (deadline is None or time.monotonic() < deadline):
        left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        for pipe in multiprocessing.connection.wait(list(waiting), left_s):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            good, outcome = _outcome(pipe, processes[rank], rank)
            if good:
                results[rank] = outcome
            else:
                failures.append(outcome)
                deadline = deadline or time.monotonic() + _GRACE_S
    if failures:
        raise _first_cause(failures)
    return [results[rank] for rank in range(len(pipes))]


def _outcome(pipe: Connection, process: BaseProcess, rank: int) -> tuple[bool, Any]:
    try:
        good, outcome = pipe.recv()
        return good, outcome
    except EOFError:
        process.join(_GRACE_S)
        code = process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
        lost = PeerLostError(f"rank {rank} (pid {process.pid}) ended without a result: {how}")
        return False, (lost, "")


def _first_cause(failures: list[tuple[BaseException, str]]) -> BaseException:
    """The first failure that is not merely another rank's echo."""
    causes = [f for f in failures if not isinstance(f[0], CommunicationError)] or failures
    error, trace = causes[0]
    if trace:
        error.add_note(trace)
    return error


def _end(processes: list[BaseProcess]) -> None:
    """Ends what still runs, gently first."""
    for stop in (BaseProcess.terminate, BaseProcess.kill):
        running = [process for process in processes if process.is_alive()]
        if running and stop is BaseProcess.terminate:
            # Ranks that have reported are about to end by themselves.
            until = time.monotonic() + _GRACE_S / 4
            for process in running:
                process.join(max(until - time.monotonic(), 0))
        for process in processes:
            if process.is_alive():
                stop(process)
        until = time.monotonic() + _GRACE_S
        for process in processes:
            process.join(max(until - time.monotonic(), 0))

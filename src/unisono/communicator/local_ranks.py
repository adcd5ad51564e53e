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
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from unisono import config
from unisono.communicator.pickling import pack
from unisono.errors import CommunicationError, PeerLostError, UnisonoError

_GRACE_S = 2.0  # seconds that the other ranks have for their reports after the first failure
_PR_SET_PDEATHSIG = 1


def run(fn: Callable[..., Any], ranks: int = 4, args: Sequence[Any] = ()) -> list[Any]:
    """Calls `fn(*args)` in `ranks` new processes and returns their results in rank order.

    In `fn`, `unisono.init()` joins the group, and so does torch's `init_process_group`: the ranks
    have torchrun's environment variables.

    The ranks are new interpreters that import the program. So the program must call `run` under `if
    __name__ == "__main__":`. Processes cannot import a notebook, `python -c` or standard input; in
    these cases `fn` is sent with all parts of the program that it uses. The arguments are copied.

    If a rank fails, the other ranks are ended and the first failure is raised here, with that
    rank's traceback as a note. Raises `PeerLostError` if a rank ends without a result, `ValueError`
    for less than 1 or more than 4096 ranks, and pickle's errors for objects that cannot be copied.

    >>> import unisono
    >>> unisono.run(max, ranks=2, args=(3, 5))
    [5, 5]
    """
    if not 1 <= ranks <= config.MOST_RANKS:
        raise ValueError(f"ranks: expected 1 to {config.MOST_RANKS} on one host, not {ranks}")
    rendezvous = f"run-{secrets.token_hex(16)}"
    task = _RankTask(fn, tuple(args), by_value=not _can_be_imported())
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    with _reserved_port() as port:
        try:
            for rank in range(ranks):
                world = config.LaunchedRank(rank=rank, size=ranks, rendezvous=rendezvous)
                process, pipe = _start(task, world, port)
                pipes.append(pipe)
                processes.append(process)
            return _collect(pipes, processes)
        finally:
            _end(processes)
            for pipe in pipes:
                pipe.close()


def _start(
    task: _RankTask, world: config.LaunchedRank, port: int
) -> tuple[BaseProcess, Connection]:
    """Starts the process of a rank. Returns the process and the pipe for its result."""
    # Never fork: a child has none of the program's threads (such as torch's OpenMP threads) but
    # would wait for them.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_child, args=(task, world, port, theirs), name=f"unisono-rank-{world.rank}"
    )
    with _without_stream_as_file():
        process.start()
    theirs.close()
    return process, ours


class _RankTask:
    """The pickled call of a rank. The rank unpickles the call in `run`, where it can report an
    error.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], *, by_value: bool) -> None:
        self._call = (fn, args)
        self._by_value = by_value
        self._packed = b""

    def __getstate__(self) -> bytes:
        return pack(self._call, by_value=self._by_value)

    def __setstate__(self, packed: bytes) -> None:
        self._packed = packed

    def run(self) -> Any:
        fn, args = pickle.loads(self._packed)
        return fn(*args)


def _can_be_imported() -> bool:
    """Returns True if new interpreters can import the program through `multiprocessing`."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).rpartition(".")[2] != "__main__"
    return Path(getattr(main, "__file__", None) or "<none>").is_file()


@contextlib.contextmanager
def _without_stream_as_file() -> Iterator[None]:
    """Stops `multiprocessing` from importing "<stdin>" as the program's file."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or _can_be_imported():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """Reserves a port for torch's store, which rank 0 opens later.

    The system gives the port to no other process that asks for a free port. The store can still
    bind it, since the store permits reuse and no socket listens here.
    """
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as holder:
        if dual:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def _child(task: _RankTask, world: config.LaunchedRank, port: int, pipe: Connection) -> None:
    # Ranks end when their parent process ends, even by a signal.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)  # the parent ended before the prctl call
    config.export(world)
    config.export_to_torch(world, port)
    try:
        pipe.send_bytes(pack((True, task.run())))
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError):
            report = (_picklable(error), f"rank {world.rank}:\n{trace}")
            pipe.send_bytes(pack((False, report)))
        if not isinstance(error, Exception):
            raise
    finally:
        pipe.close()


def _picklable(error: BaseException) -> BaseException:
    """Returns the error if it can be pickled and is not SystemExit, else an error with its text."""
    if isinstance(error, SystemExit):
        return UnisonoError(f"the rank called sys.exit({error.code!r})")
    try:
        clone = pickle.loads(pack(error))
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
        packed = pipe.recv_bytes()
    except EOFError:
        process.join(_GRACE_S)
        code = process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
        lost = PeerLostError(f"rank {rank} (pid {process.pid}) ended without a result: {how}")
        return False, (lost, "")
    good, outcome = pickle.loads(packed)
    return good, outcome


def _first_cause(failures: list[tuple[BaseException, str]]) -> BaseException:
    """Returns the first failure that is not only a consequence of another rank's failure."""
    causes = [f for f in failures if not isinstance(f[0], CommunicationError)] or failures
    error, trace = causes[0]
    if trace:
        error.add_note(trace)
    return error


def _end(processes: list[BaseProcess]) -> None:
    """Ends processes that still run, first by SIGTERM, then by SIGKILL."""
    for stop in (BaseProcess.terminate, BaseProcess.kill):
        running = [process for process in processes if process.is_alive()]
        if running and stop is BaseProcess.terminate:
            # Ranks that have sent their report end soon by themselves.
            until = time.monotonic() + _GRACE_S / 4
            for process in running:
                process.join(max(until - time.monotonic(), 0))
        for process in processes:
            if process.is_alive():
                stop(process)
        until = time.monotonic() + _GRACE_S
        for process in processes:
            process.join(max(until - time.monotonic(), 0))

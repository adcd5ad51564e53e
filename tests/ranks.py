"""Ranks for tests: fast ones as threads of this process, or processes that a test can kill."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import itertools
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import unisono
from forked_ranks import Child, forker, is_readable
from time_limits import PATIENCE_S
from unisono import Communicator
from unisono.errors import CommunicationError

_numbers = itertools.count()
_GO = signal.SIGUSR2
"""The signal of `Processes.go`."""
_ENDS_S = 90.0
"""Seconds after which a test fails that waits for ranks; less than the time limit of a test."""


def unique_name() -> str:
    """Returns a rendezvous that no other test uses."""
    return f"test-{os.getpid()}-{next(_numbers)}"


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Leaves the process without free descriptors, so that it can accept no connection."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    # uses all free numbers below the highest descriptor
    holders = [os.dup(0) for _ in range(highest)]
    top = max(holders)
    resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in holders:
            os.close(fd)


# ---- threads


class Threads:
    """Ranks as threads of this process. Each keeps its thread and its communicator."""

    def __init__(
        self, ranks: int, *, timeout_s: float = 30.0, reproducible: bool | None = None
    ) -> None:
        self.ranks = ranks
        self.healthy = True
        self._pools = [concurrent.futures.ThreadPoolExecutor(1) for _ in range(ranks)]
        name = unique_name()

        def join(rank: int) -> Communicator:
            comm = unisono.init(
                rank=rank,
                size=ranks,
                rendezvous=name,
                timeout_s=max(timeout_s, 30.0),  # a short timeout is only for the tests' calls
                reproducible=reproducible,
            )
            comm.timeout_s = timeout_s
            return comm

        self.comms: list[Communicator] = [
            future.result(PATIENCE_S)
            for future in [pool.submit(join, rank) for rank, pool in enumerate(self._pools)]
        ]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs `function(comm, *args)` on every rank. Returns the results, or raises the first
        failure.
        """
        outcomes = self._call(function, args, abort=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            self.healthy = False
            causes = [e for e in errors if not isinstance(e, CommunicationError)] or errors
            raise causes[0]
        return outcomes

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs `function(comm, *args)` on every rank. Returns each rank's result or error."""
        self.healthy = False
        return self._call(function, args, abort=False)

    def _call(self, function: Callable[..., Any], args: Sequence[Any], *, abort: bool) -> list[Any]:
        def body(comm: Communicator) -> Any:
            try:
                return function(comm, *args)
            except Exception as error:
                if abort:  # otherwise the other ranks would wait for this rank until the timeout
                    comm.abort(f"{type(error).__name__}: {error}")
                return error

        futures = [
            pool.submit(body, comm) for pool, comm in zip(self._pools, self.comms, strict=True)
        ]
        return [future.result(100) for future in futures]

    def close(self) -> None:
        """Closes the communicators and ends the threads."""
        for comm in self.comms:
            comm.close()
        for pool in self._pools:
            pool.shutdown()

    def __enter__(self) -> Threads:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# ---- processes


class Me:
    """What a rank's process passes to its function: the rank's number, and methods that join the
    group and report to the test.
    """

    def __init__(self, rank: int, size: int, name: str, pipe: int) -> None:
        self.rank = rank
        self.size = size
        self.name = name
        self._pipe = pipe

    def join(self, timeout_s: float = 30.0) -> Communicator:
        """Returns the communicator of all ranks."""
        return unisono.init(
            rank=self.rank, size=self.size, rendezvous=self.name, timeout_s=timeout_s
        )

    def wait_for_go(self) -> None:
        """Waits until the test calls `Processes.go` for this rank."""
        signal.sigwait([_GO])

    def stop(self) -> None:
        """Stops this process until SIGCONT arrives. The test calls `Processes.wait_for_stop`."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def say(self, event: str, **facts: Any) -> None:
        """Sends an event to the test. All threads and forked children may call this."""
        line = json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n"
        os.write(self._pipe, line.encode())

    def attempt(self, event: str, function: Callable[..., Any], *args: Any) -> None:
        """Calls the function, and sends its result and time to the test."""
        error = text = None
        try:
            function(*args)
        except BaseException as raised:
            error, text = type(raised).__name__, str(raised)
        self.say(event, error=error, text=text)


class Processes:
    """Ranks as processes that run `function(me)`, imported from the function's file. Kills
    remaining ranks at the end.

    The processes are forked from a process that has imported their modules. `environment(rank)` is
    added to their environment. `place(rank)` has further arguments of `Forker.start`. `modules` are
    large modules that the function imports.
    """

    def __init__(
        self,
        function: Callable[[Me], Any],
        ranks: int,
        *,
        name: str | None = None,
        environment: Callable[[int], dict[str, str]] = lambda rank: {},
        place: Callable[[int], dict[str, int | None]] = lambda rank: {},
        modules: Sequence[str] = (),
    ) -> None:
        self.ranks = ranks
        self.events: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
        self._pipes: list[int] = []
        self._unread = [b""] * ranks
        self.processes: list[Child] = []
        name = name or unique_name()
        file = function.__code__.co_filename
        for rank in range(ranks):
            ours, theirs = os.pipe()
            words = [file, function.__name__, str(rank), str(ranks), name]
            added = {**os.environ, **environment(rank)}
            self.processes.append(forker(*modules).start(words, theirs, added, **place(rank)))
            os.close(theirs)
            self._pipes.append(ours)

    def wait_for(self, event: str, ranks: Sequence[int], timeout_s: float = _ENDS_S) -> list[Any]:
        """Waits until each of the ranks has reported this event. Returns the ranks' events."""
        deadline = time.monotonic() + timeout_s
        return [self._wait_for(event, rank, deadline) for rank in ranks]

    def _wait_for(self, event: str, rank: int, deadline: float) -> dict[str, Any]:
        while True:
            for said in self.events[rank]:
                if said["event"] == event:
                    return said
            left_s = deadline - time.monotonic()
            readable = is_readable(self._pipes[rank], max(left_s, 0))
            if not readable or not self._read(rank):
                why = "ended" if readable else "is late"
                raise AssertionError(f"rank {rank} {why} before {event!r}: {self.events[rank]}")

    def _read(self, rank: int) -> bool:
        """Waits for more events of the rank. Returns False after the rank's end."""
        data = os.read(self._pipes[rank], 65536)
        *lines, self._unread[rank] = (self._unread[rank] + data).split(b"\n")
        self.events[rank] += [json.loads(line) for line in lines]
        return bool(data)

    def everything(self, rank: int) -> list[dict[str, Any]]:
        """Returns all events of a rank until its end."""
        while self._read(rank):
            pass
        return self.events[rank]

    def signal(self, rank: int, number: int) -> float:
        """Sends a signal and returns its time."""
        self.processes[rank].send_signal(number)
        return time.monotonic()

    def go(self, *ranks: int) -> None:
        """Ends `wait_for_go` of these ranks, or their next one."""
        for rank in ranks:
            self.signal(rank, _GO)

    def wait_for_stop(self, rank: int) -> None:
        """Waits until the process of a rank is stopped."""
        deadline = time.monotonic() + PATIENCE_S
        stat = Path(f"/proc/{self.processes[rank].pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, f"rank {rank} does not stop"
            time.sleep(0.005)

    def exit_codes(self, timeout_s: float = _ENDS_S) -> list[int]:
        """Waits for the ends of all ranks and returns their exit codes."""
        return [process.wait(timeout_s) for process in self.processes]

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        for pipe in self._pipes:
            os.close(pipe)


def run_rank(file: str, function: str, rank: str, size: str, name: str, pipe: str | int) -> None:
    """Runs a rank that is a process."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    # before any other thread starts: the threads inherit this
    signal.pthread_sigmask(signal.SIG_BLOCK, [_GO])
    me = Me(int(rank), int(size), name, int(pipe))
    try:
        getattr(module, function)(me)
    except BaseException as error:
        me.say("failed", error=type(error).__name__, text=traceback.format_exc())
        raise

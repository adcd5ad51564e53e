"""Ranks as processes of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from unisono import config
from unisono.bootstrap import reserved_port
from unisono.errors import PeerLostError
from unisono.launch import rank_threads
from unisono.launch.pickling import pack
from unisono.launch.rank_process import end_with_parent, report
from unisono.launch.rank_results import GRACE_S, collect, ended


def run_here(fn: Callable[..., Any], ranks: int, args: Sequence[Any], *, bind: bool) -> list[Any]:
    """Calls `fn(*args)` in `ranks` processes of this machine, as `unisono.run` describes."""
    rendezvous = f"run-{secrets.token_hex(16)}"
    task = _RankTask(fn, tuple(args), by_value=not _can_be_imported(), binds=bind)
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    with reserved_port() as port:
        try:
            for rank in range(ranks):
                world = config.LaunchedRank(rank=rank, size=ranks, rendezvous=rendezvous)
                process, pipe = _start(task, world, port)
                pipes.append(pipe)
                processes.append(process)
            return collect(pipes, lambda rank: _ended(rank, processes[rank]))
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
    """The call of a rank, which stays pickled until the rank can report an error."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], *, by_value: bool, binds: bool
    ) -> None:
        self._call = (fn, args)
        self._by_value = by_value
        self.binds = binds
        self.packed = b""

    def __getstate__(self) -> tuple[bytes, bool]:
        return pack(self._call, by_value=self._by_value), self.binds

    def __setstate__(self, state: tuple[bytes, bool]) -> None:
        self.packed, self.binds = state


def _can_be_imported() -> bool:
    """Returns True if new interpreters can import the program through `multiprocessing`."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).rpartition(".")[2] != "__main__"
    if main.__name__ == "__main__" and getattr(main, "__loader__", None) is None:
        return False  # a notebook of marimo, whose file defines functions only inside of cells
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


def _child(task: _RankTask, world: config.LaunchedRank, port: int, pipe: Connection) -> None:
    end_with_parent()
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)  # the parent ended before the call above
    config.export(world)
    here = config.LocalRank(rank=world.rank, size=world.size)
    config.export_to_torch(world, ("127.0.0.1", port), here)
    rank_threads.share(world.rank, world.size, bind=task.binds)
    report(task.packed, world.rank, pipe)


def _ended(rank: int, process: BaseProcess) -> PeerLostError:
    process.join(GRACE_S)
    return ended(rank, process.pid, process.exitcode)


def _end(processes: list[BaseProcess]) -> None:
    """Ends processes that still run, first by SIGTERM, then by SIGKILL."""
    for stop in (BaseProcess.terminate, BaseProcess.kill):
        running = [process for process in processes if process.is_alive()]
        if running and stop is BaseProcess.terminate:
            # Ranks that have sent their report end soon by themselves.
            until = time.monotonic() + GRACE_S / 4
            for process in running:
                process.join(max(until - time.monotonic(), 0))
        for process in processes:
            if process.is_alive():
                stop(process)
        until = time.monotonic() + GRACE_S
        for process in processes:
            process.join(max(until - time.monotonic(), 0))

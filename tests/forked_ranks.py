"""Ranks forked from a process that has imported the ranks' modules, since imports take most of a
second.

As a program, this file is the process that forks ranks. The process has one thread and has only
imported modules, so a forked rank begins like a new interpreter. A rank also ends like an
interpreter: it returns from the program's last line.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

_MOST_BYTES = 1 << 17


def is_readable(descriptor: int, timeout_s: float | None) -> bool:
    """Waits until a descriptor of any number is readable. Returns False after the timeout."""
    poll = select.poll()  # select() refuses numbers from 1024 on
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1e3 * timeout_s))


class Child:
    """A forked rank, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, forker: Forker, pid: int) -> None:
        self.pid = pid
        self._nursery = forker
        self._pidfd = os.pidfd_open(pid)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code if the process has ended, else None."""
        if self._code is None and is_readable(self._pidfd, 0):
            self._code = self._nursery.ask({"status": self.pid})
            os.close(self._pidfd)
        return self._code

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for the end and returns the exit code."""
        if self._code is None:
            is_readable(self._pidfd, timeout_s)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"rank (pid {self.pid})", timeout_s or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal. Does nothing after the rank has ended, since another process may have its
        number.
        """
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forker:
    """The tests' handle of the process that forks ranks."""

    def __init__(self, *modules: str) -> None:
        """Starts the process. It imports `modules` before any fork, in addition to the modules that
        all ranks need.
        """
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self._close)

    def ask(self, request: dict[str, Any], fds: tuple[int, ...] = ()) -> int:
        """Sends a request. Returns the reply: the number of a new process, or an exit code."""
        socket.send_fds(self._ours, [json.dumps(request).encode()], list(fds))
        answer = self._ours.recv(_MOST_BYTES)
        assert answer, "the process that forks ranks has ended"
        return int(answer)

    def start(
        self,
        words: list[str],
        pipe: int,
        environment: dict[str, str],
        *,
        host: int | None = None,
        descriptors: int | None = None,
    ) -> Child:
        """Starts a rank with these arguments, which writes to `pipe`. With `host`, the rank joins
        this process's namespaces. `descriptors` limits the rank's open files.
        """
        # The rank's output goes to this process's current output.
        fds = (pipe, 1, 2)
        request = {
            "words": words, "environment": environment, "folder": os.getcwd(), "host": host,
            "descriptors": descriptors,
        }  # fmt: skip
        return Child(self, self.ask(request, fds))

    def _close(self) -> None:
        self._ours.close()
        self._process.wait(10)


@functools.cache
def forker(*modules: str) -> Forker:
    """Returns the process that forks ranks with these modules; starts it on first use."""
    return Forker(*modules)


# ---- the process that forks ranks


def serve(parent: socket.socket, rank: Callable[..., None]) -> Callable[[], None]:
    """Forks a process for each request. In the child, returns the child's task. In the parent,
    returns an empty task after the last request.
    """
    while True:
        data, fds, _, _ = socket.recv_fds(parent, _MOST_BYTES, 3)
        if not data:
            return lambda: None
        request = json.loads(data)
        if "status" in request:
            _, status = os.waitpid(request["status"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                parent.close()
                return functools.partial(_become, rank, request, *fds)
            for fd in fds:
                os.close(fd)
        with contextlib.suppress(BrokenPipeError):
            parent.send(str(answer).encode())


def _become(rank: Callable[..., None], request: dict[str, Any], pipe: int, *output: int) -> None:
    for fd, standard in zip(output, (1, 2), strict=True):
        os.dup2(fd, standard)
        os.close(fd)
    if request["host"] is not None:
        _move_to(request["host"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if (most := request["descriptors"]) is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rank(*request["words"], pipe)


def _move_to(process: int) -> None:
    """Enters the namespaces of a lab host."""
    libc = ctypes.CDLL(None, use_errno=True)
    opened = [os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt")]
    for namespace in opened:
        if libc.setns(namespace, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)


if __name__ == "__main__":
    # ruff: noqa: F401
    import hypothesis
    import numpy
    import pytest

    import unisono.native
    from ranks import run_rank

    unisono.native.usable_cores()  # loads the native core
    for module in sys.argv[2:]:
        importlib.import_module(module)
    # Restores SIGINT. Under nohup and in background jobs of a shell, SIGINT is ignored, also by
    # child processes.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve(socket.socket(fileno=int(sys.argv[1])), run_rank)()

"""Works: what torch gets back from a collective, and the futures made from them."""

from __future__ import annotations

import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch.futures import Future

from unisono.torch_backend.convert import seconds
from unisono.torch_backend.private import WorkBase, hide_from_dynamo, is_profiling, span

# A callback of the program may hang; then the thread is left to itself.
_JOIN_S = 2.0


class Handle(Protocol):
    """A collective under way: the part of the communicator's Work that is used here."""

    def wait(self, timeout_s: float | None = None) -> Any:
        """Block until done; raises what went wrong."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""

    def exception(self) -> Exception | None:
        """What went wrong, if it has ended badly."""


class Together:
    """Several handles that count as one: done when all are, failed when one is."""

    __slots__ = ("__weakref__", "handles")

    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for each in order; `timeout_s` bounds each one."""
        for handle in self.handles:
            handle.wait(timeout_s)

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(handle.is_completed() for handle in self.handles)

    def exception(self) -> Exception | None:
        """The first failure in order of issue."""
        failures = (handle.exception() for handle in self.handles)
        return next((failure for failure in failures if failure is not None), None)


class Completer:
    """Completes futures as their handles end, on a daemon thread started at first need.

    Handles are waited for in the order they came. A callback that runs on the thread may itself
    start a collective and wait for its future (PowerSGD does), so futures asked for on a
    completer's own thread go to a successor with a thread of its own.

    A failed future raises RuntimeError with the failure's type and text, for Python and C++ alike.
    `Future.set_exception` would keep the type, but only for Python: to C++, to which DDP hands its
    futures, it looks like a success whose value is no list of tensors, and the process crashes.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Handle, list[torch.Tensor]] | None] = (
            SimpleQueue()
        )
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._successor: Completer | None = None

    def future_of(self, handle: Handle, tensors: list[torch.Tensor]) -> Future[Any]:
        """A future of `tensors` that completes, or fails, as `handle` does."""
        outcome: Future[Any] = Future()
        if handle.is_completed() and handle.exception() is None:
            _settle(outcome, handle, tensors)
            return outcome
        future = outcome.then(_value_or_raise)
        self._enqueue((outcome, handle, tensors))
        return future

    def close(self) -> None:
        """End the threads once the futures already asked for are complete.

        Call it when their handles have ended or are about to: it waits for the threads, since one
        that still runs when the interpreter ends would abort the process.
        """
        with self._lock:
            thread, self._thread = self._thread, None
            successor, self._successor = self._successor, None
            if thread is not None:
                self._jobs.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
        if successor is not None:
            successor.close()

    def _enqueue(self, job: tuple[Future[Any], Handle, list[torch.Tensor]]) -> None:
        with self._lock:
            if threading.current_thread() is self._thread:
                self._successor = self._successor or Completer()
                successor = self._successor
            else:
                successor = None
                self._jobs.put(job)
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="unisono-futures", daemon=True
                    )
                    self._thread.start()
        if successor is not None:
            successor._enqueue(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            _settle(*job)
            del job  # or the last tensors would live until the next job


def _settle(outcome: Future[Any], handle: Handle, tensors: list[torch.Tensor]) -> None:
    try:
        handle.wait()
    except Exception as error:
        outcome.set_result(error)
    else:
        outcome.set_result(tensors)


def _value_or_raise(outcome: Future[Any]) -> Any:
    value = outcome.value()
    if isinstance(value, Exception):
        raise value
    return value


class PendingWork(WorkBase):  # type: ignore[misc]
    """A call under way, as torch sees it; `pending` makes them."""

    __slots__ = ("_completer", "_future", "_handle", "_tensors")

    _completer: Completer
    _future: Future[Any]
    _handle: Any
    _tensors: list[torch.Tensor]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in the tensors; raises what went wrong.

        A `timeout` only ends the waiting, with TimeoutError: the collective goes on.
        """
        if is_profiling():
            with span("unisono:wait", self._tensors, {}):
                self._handle.wait(None if timeout is None else seconds(timeout))
        else:
            self._handle.wait(None if timeout is None else seconds(timeout))
        return True

    def synchronize(self) -> None:
        """Same as wait: there is no device stream to order after."""
        self.wait()

    def block_current_stream(self) -> None:
        """Same as wait: there is no device stream to order after."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(self._handle.is_completed())

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self._handle.exception() is None

    def exception(self) -> Exception | None:
        """What went wrong, or None."""
        error: Exception | None = self._handle.exception()
        return error

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold, or will hold, the result."""
        return self._tensors

    def source_rank(self) -> int:
        """The rank in the group that a receive got its message from."""
        return int(self._handle.source_rank())

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """A future of the list of result tensors."""
        if not hasattr(self, "_future"):
            self._future = self._completer.future_of(self._handle, self._tensors)
        return self._future


def pending(handle: Any, tensors: list[torch.Tensor], completer: Completer) -> PendingWork:
    """The work of a call whose handle this is, and whose result is in the tensors.

    Not a constructor: one that is Python's, for a class that is C++'s, takes 0.3 us of the 0.7.
    """
    work = PendingWork()
    work._handle = handle
    work._tensors = tensors
    work._completer = completer
    return work


class FinishedWork(WorkBase):  # type: ignore[misc]
    """A collective that was done when the call returned."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self._tensors = tensors or []

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Nothing to wait for."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def block_current_stream(self) -> None:
        """Nothing to wait for."""

    def is_completed(self) -> bool:
        """Always."""
        return True

    def is_success(self) -> bool:
        """Always: a failure is raised by the call itself."""
        return True

    def exception(self) -> None:
        """None: a failure is raised by the call itself."""

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result."""
        return self._tensors

    def get_future(self) -> Future[Any]:
        """A completed future of the list of result tensors."""
        future: Future[Any] = Future()
        future.set_result(self._tensors)
        return future


# Blocking calls share this one: torch drops their work, and making one costs 0.3 us.
DONE = FinishedWork()

hide_from_dynamo(PendingWork, FinishedWork, Completer, Together)

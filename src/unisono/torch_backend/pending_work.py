"""The `Work` objects that torch gets from a collective, and their futures."""

from __future__ import annotations

import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch.futures import Future

from unisono.torch_backend.convert import seconds
from unisono.torch_backend.private import WorkBase, hide_from_dynamo, is_profiling, span

# Maximum seconds to wait for the end of a thread, since a callback of the program may hang.
_JOIN_S = 2.0


class CallHandle(Protocol):
    """A pending collective: the methods of the communicator's `Work` that are used here."""

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits for the end; raises the failure of the call."""

    def is_completed(self) -> bool:
        """Returns True if the call has ended, with or without an error."""

    def exception(self) -> Exception | None:
        """Returns the failure of the call, else None."""


class CombinedHandle:
    """Several handles as one: it ends when all have ended, and fails when one has failed."""

    __slots__ = ("__weakref__", "handles")

    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for each handle in order, at most `timeout_s` for each."""
        for handle in self.handles:
            handle.wait(timeout_s)

    def is_completed(self) -> bool:
        """Returns True if all calls have ended."""
        return all(handle.is_completed() for handle in self.handles)

    def exception(self) -> Exception | None:
        """Returns the failure of the first failed call in issue order."""
        failures = (handle.exception() for handle in self.handles)
        return next((failure for failure in failures if failure is not None), None)


class Completer:
    """Completes futures when their handles end, on a daemon thread that starts on first use.

    The thread waits for handles in the order of their arrival. A callback on the thread may itself
    start a collective and wait for its future (PowerSGD does). So a future requested on this thread
    goes to a second completer with its own thread.

    A failed future raises RuntimeError with the failure's type and text, in Python and in C++.
    `Future.set_exception` would keep the type, but only for Python. C++ code, such as DDP's, would
    see a success whose value is not a list of tensors, and the process would crash.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], CallHandle, list[torch.Tensor]] | None] = (
            SimpleQueue()
        )
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._successor: Completer | None = None

    def future_of(self, handle: CallHandle, tensors: list[torch.Tensor]) -> Future[Any]:
        """Returns a future of `tensors` that completes or fails with `handle`."""
        outcome: Future[Any] = Future()
        if handle.is_completed() and handle.exception() is None:
            _settle(outcome, handle, tensors)
            return outcome
        future = outcome.then(_value_or_raise)
        self._enqueue((outcome, handle, tensors))
        return future

    def close(self) -> None:
        """Ends the threads after the requested futures are complete.

        Call it when the handles have ended or will soon end. It waits for the threads, since a
        thread that runs when the interpreter ends would abort the process.
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

    def _enqueue(self, job: tuple[Future[Any], CallHandle, list[torch.Tensor]]) -> None:
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
            del job  # else this frame would keep the job's tensors alive until the next job


def _settle(outcome: Future[Any], handle: CallHandle, tensors: list[torch.Tensor]) -> None:
    try:
        # on a device, callbacks of a future may use any stream
        getattr(handle, "synchronize", handle.wait)()
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
    """Torch's `Work` for a pending call. The function `pending` makes these objects."""

    __slots__ = ("_completer", "_future", "_handle", "_tensors")

    _completer: Completer
    _future: Future[Any]
    _handle: Any
    _tensors: list[torch.Tensor]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the tensors have the result; raises the failure of the call.

        A `timeout` only ends the wait, with TimeoutError: the collective goes on.
        """
        if is_profiling():
            with span("unisono:wait", self._tensors, {}):
                self._handle.wait(None if timeout is None else seconds(timeout))
        else:
            self._handle.wait(None if timeout is None else seconds(timeout))
        return True

    def synchronize(self) -> None:
        """Waits like `wait`: there is no device stream to synchronize."""
        self.wait()

    def block_current_stream(self) -> None:
        """Waits like `wait`: there is no device stream to block."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns True if the call has ended, with or without an error."""
        return bool(self._handle.is_completed())

    def is_success(self) -> bool:
        """Returns True if the call has ended without an error."""
        return self.is_completed() and self._handle.exception() is None

    def exception(self) -> Exception | None:
        """Returns the failure of the call, else None."""
        error: Exception | None = self._handle.exception()
        return error

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors for the result, which may still be incomplete."""
        return self._tensors

    def source_rank(self) -> int:
        """Returns the source rank of a receive, as a rank of the group."""
        return int(self._handle.source_rank())

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Returns a future of the list of result tensors."""
        if not hasattr(self, "_future"):
            self._future = self._completer.future_of(self._handle, self._tensors)
        return self._future


def pending(handle: Any, tensors: list[torch.Tensor], completer: Completer) -> PendingWork:
    """Returns the work of a call with this handle and these result tensors.

    This is not a constructor: a Python constructor of a C++ class takes 0.3 us of the total 0.7 us.
    """
    work = PendingWork()
    work._handle = handle
    work._tensors = tensors
    work._completer = completer
    return work


class FinishedWork(WorkBase):  # type: ignore[misc]
    """A collective that had ended when the call returned."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self._tensors = tensors or []

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns at once, since the call has ended."""
        return True

    def synchronize(self) -> None:
        """Returns at once, since the call has ended."""

    def block_current_stream(self) -> None:
        """Returns at once, since the call has ended."""

    def is_completed(self) -> bool:
        """Returns True, since the call has ended."""
        return True

    def is_success(self) -> bool:
        """Returns True: a call that fails raises an error and returns no work."""
        return True

    def exception(self) -> None:
        """Returns None: a call that fails raises an error and returns no work."""

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that have the result."""
        return self._tensors

    def get_future(self) -> Future[Any]:
        """Returns a completed future of the list of result tensors."""
        future: Future[Any] = Future()
        future.set_result(self._tensors)
        return future


# Blocking calls share this object: torch drops their work, and making a new one takes 0.3 us.
DONE = FinishedWork()

hide_from_dynamo(PendingWork, FinishedWork, Completer, CombinedHandle)

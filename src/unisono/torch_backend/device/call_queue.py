"""The order of a group's calls on a device, and their handles."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from unisono.errors import CollectiveTimeoutError
from unisono.torch_backend.private import hide_from_dynamo

Job = Callable[[], Any]


class DeviceCall:
    """The handle of a call on a device.

    The host part of a call ends when all ranks have made it and its device work is enqueued.
    """

    __slots__ = ("__weakref__", "_device", "_ended", "_error", "_finish", "_mark", "_source")

    def __init__(self, device: Any, finish: Callable[[], None] | None = None) -> None:
        """`finish` copies results to the caller's tensors, on the stream that waits."""
        self._device, self._finish = device, finish
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._mark: Any = None
        self._source = -1

    def end(self, mark: Any = None, error: Exception | None = None, source: int = -1) -> None:
        """Notes the end of the host part: the position of the device work, or the failure."""
        self._mark, self._error, self._source = mark, error, source
        self._ended.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Makes the current stream wait for the call; blocks until its host part has ended.

        Raises the failure of the call, and `CollectiveTimeoutError` after `timeout_s`.
        """
        if not self._ended.wait(timeout_s):
            raise CollectiveTimeoutError(
                f"the call on the device has not begun on all ranks: timeout after {timeout_s:g} s"
            )
        if self._error is not None:
            raise self._error
        self._device.wait_mark(self._mark)
        finish, self._finish = self._finish, None
        if finish is not None:
            self._device.enqueue(finish)

    def synchronize(self) -> None:
        """Waits until the results are in the caller's tensors, for every stream."""
        self.wait()
        self._device.synchronize(self._device.mark())

    def is_completed(self) -> bool:
        """Returns True if the call has failed or the device has ended it."""
        if not self._ended.is_set():
            return False
        return self._error is not None or bool(self._device.has_passed(self._mark))

    def exception(self) -> Exception | None:
        """Returns the failure of the call, else None."""
        return self._error if self._ended.is_set() else None

    def source_rank(self) -> int:
        """Returns the source rank of a receive."""
        return self._source


class CallQueue:
    """Runs the calls of a group in the order of the program.

    A blocking call runs in the caller's thread if no earlier call is left; other calls run in a
    thread that starts on first use.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._jobs: SimpleQueue[tuple[DeviceCall, Job, Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._open = 0
        self._running: deque[tuple[Any, Job]] = deque()
        """Jobs whose device work may not have ended, with its end; they keep their tensors."""
        self._thread: threading.Thread | None = None

    def run(self, job: Job) -> Any:
        """Runs a job after all earlier ones, on the current stream; returns its result."""
        with self._lock:
            while self._open:
                self._idle.wait()
            self._open += 1
        try:
            with self._device.selected():
                found = job()
            self._device.keep(job)
            return found
        finally:
            self._end_one()

    def begin(self, job: Job, finish: Callable[[], None] | None = None) -> DeviceCall:
        """Runs a job after all earlier ones, on the side stream; returns its handle."""
        call = DeviceCall(self._device, finish)
        mark = self._device.mark()
        with self._lock:
            self._open += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run_all, name="unisono-device", daemon=True
                )
                self._thread.start()
            self._jobs.put((call, job, mark))
        return call

    def close(self) -> None:
        """Ends the thread after the jobs that it has."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._jobs.put(None)

    def _run_all(self) -> None:
        while (found := self._jobs.get()) is not None:
            call, job, mark = found
            try:
                with self._device.on_side_stream():
                    self._device.wait_mark(mark)
                    job()
                    end = self._device.mark()
                self._keep(end, job)
                call.end(end)
            except Exception as error:
                call.end(error=error)
            finally:
                del found, call, job, mark  # else they would live until the next call
                self._end_one()

    def _keep(self, end: Any, job: Job) -> None:
        """Keeps the tensors of a job until the device has ended it."""
        self._running.append((end, job))
        while self._running and self._device.has_passed(self._running[0][0]):
            self._running.popleft()

    def _end_one(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._idle.notify_all()


hide_from_dynamo(DeviceCall, CallQueue)

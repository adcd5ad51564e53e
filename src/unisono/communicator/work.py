"""Handles of pending calls."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from unisono import errors, native
from unisono.types import Op

_OPS = tuple(Op)

_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 10e-6, 1e-3  # shortest and longest sleep of `_poll_for_any`

_FAULTS: dict[int, type[errors.UnisonoError]] = {
    1: errors.PeerLostError,
    2: errors.CollectiveTimeoutError,
    3: errors.MismatchError,
    4: errors.AbortedError,
    5: errors.AbortedError,
}


def _exception(found: tuple[int, str] | None) -> errors.UnisonoError | None:
    if found is None:
        return None
    fault, text = found
    return _FAULTS.get(fault, errors.UnisonoError)(text)


def _left_s(until: float | None) -> float | None:
    return None if until is None else max(until - time.monotonic(), 0.0)


class Work(ABC):
    """The handle of an asynchronous call. The program must not touch the call's arrays until the
    call is complete.
    """

    def __init__(self, finish: Callable[[], Any] | None, result: Any = None) -> None:
        """`finish`, if not None, is called once after the end and returns the result."""
        self._finish = finish
        self._result = result
        self._lock = threading.RLock() if finish is not None else None
        self._finishing = False

    def __repr__(self) -> str:
        return f"<Work: {self._call()}, {self._state()}>"

    def _state(self) -> str:
        if not self._poll():
            return "pending"
        error = self.exception()
        return "done" if error is None else f"failed: {type(error).__name__}: {error}"

    @abstractmethod
    def _call(self) -> str:
        """Returns the call as text."""

    @abstractmethod
    def _wait_native(self, timeout_s: float | None) -> bool:
        """Waits for the end of the call. Returns False after the timeout; raises the failure of the
        call.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Returns True if the call has ended, with or without an error."""

    @abstractmethod
    def exception(self) -> Exception | None:
        """Returns the failure of the call after its end, else None."""

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits for the end and returns the result.

        Raises the failure of the call, or `TimeoutError` if the call is still pending after
        `timeout_s` seconds; the call then goes on. Raises `UnisonoError` in a signal handler that
        interrupted the end of this method.
        """
        # For the native wait, a negative timeout means no limit.
        if not self._wait_native(None if timeout_s is None else max(0.0, timeout_s)):
            raise TimeoutError(f"the call is still under way: timeout after {timeout_s:g} s")
        if self._lock is not None:
            with self._lock:  # if two threads wait, only one completes the result
                self._finish_once()
        return self._result

    def _finish_once(self) -> None:
        if self._finishing:
            raise errors.UnisonoError(
                "a signal handler cannot wait for this call, since the interrupted thread is "
                "completing its result: wait after the handler"
            )
        self._finishing = True
        try:
            if self._finish is not None:
                self._result = self._finish()
                self._finish = None
        finally:
            self._finishing = False

    def result(self) -> Any:
        """Waits for the call and returns the result."""
        return self.wait()

    def test(self) -> bool:
        """Returns True if the call has ended, with or without an error. Makes progress without
        waiting.
        """
        return self.is_completed()

    def _poll(self) -> bool:
        """Polls like `test`, but does not end the call if its peer has left."""
        return self.is_completed()

    def _cannot_complete(self) -> bool:
        """Returns True if every rank that could complete the call has left. False for collectives,
        which end by themselves.
        """
        return False

    def _end_if_late(self, waited_s: float) -> None:  # noqa: B027 - collectives end themselves
        """Ends a polled call if it has exceeded its timeout."""

    def cancel(self) -> bool:
        """Cancels a receive that has no message yet, or a send of which no part has reached the
        receiver.

        Returns True if the message was cancelled; `wait` then raises `UnisonoError`. Returns False
        if the call goes on, and for all collectives.
        """
        return False

    @staticmethod
    def wait_all(works: Iterable[Work], timeout_s: float | None = None) -> list[Any]:
        """Waits for all `works`. Returns their results in order. Raises the errors of `wait`."""
        works = list(works)
        results: list[Any] = native.wait_all(works, timeout_s)
        if results is not NotImplemented:
            return results
        until = None if timeout_s is None else time.monotonic() + timeout_s
        return [work.wait(_left_s(until)) for work in works]

    @staticmethod
    def wait_any(works: Iterable[Work], timeout_s: float | None = None) -> int:
        """Waits until one work has ended, with or without an error. Returns its position in
        `works`.

        Raises `TimeoutError` if all are still pending after `timeout_s` seconds, and `ValueError`
        if `works` is empty. Without `timeout_s`, the timeout of the works' communicator applies.
        """
        works = list(works)
        if not works:
            raise ValueError("works: expected at least one work to wait for, not an empty list")
        found: int = native.wait_any(works, timeout_s)
        return _poll_for_any(works, timeout_s) if found is NotImplemented else found


def _poll_for_any(works: Sequence[Work], timeout_s: float | None) -> int:
    """Polls works of several kinds or communicators in turn, until one has ended."""
    began_s, sleep_s = time.monotonic(), _SHORTEST_SLEEP_S
    while True:
        for place, work in enumerate(works):
            if work._poll():
                return place
        waited_s = time.monotonic() - began_s
        if timeout_s is not None and waited_s >= timeout_s:
            raise TimeoutError(f"all are still under way: timeout after {timeout_s:g} s")
        for work in works:
            work._end_if_late(waited_s)
        if all(work._cannot_complete() for work in works):
            works[0].test()
        time.sleep(sleep_s if timeout_s is None else min(sleep_s, timeout_s - waited_s))
        sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)


# `native.Request` is the handle of one message. C++ makes it and waits for it without Python code.
Work.register(native.Request)


class CollectiveWork(Work):
    """A pending collective. Its `job` is None before the call begins. `keep` keeps its memory
    alive.
    """

    def __init__(
        self,
        group: native.Group,
        op: int | str,
        keep: object,
        result: Any,
        finish: Callable[[], Any] | None,
        release: Callable[[Work], None],
    ) -> None:
        """`op` is the code or the name of the operation. `release` is called after the end of the
        call.
        """
        super().__init__(finish, result)
        self._group = group
        self._op = op
        self._let_go = release
        self.keep = keep
        self.storages: object = None
        """Storages of tensors, for a call that C++ begins: `keep` has only the tensors."""
        self.job: native.Job | None = None

    def _call(self) -> str:
        return self._op if isinstance(self._op, str) else _OPS[self._op]

    def _wait_native(self, timeout_s: float | None) -> bool:
        assert self.job is not None
        if not self._group.wait(self.job, -1.0 if timeout_s is None else timeout_s):
            return False
        self._let_go(self)
        return True

    def is_completed(self) -> bool:
        return self.job is not None and self.job.done()

    def exception(self) -> Exception | None:
        return None if self.job is None else _exception(self.job.error())


class PendingCalls:
    """Keeps the arrays of pending calls alive, even if the program drops its handles.

    A call is added before it begins. A call that C++ begins is added in the same step. After the
    begin, other threads read and write the arrays, and a signal handler may raise an error before
    the caller has the handle.
    """

    def __init__(self, group: native.Group) -> None:
        self._group = group
        self._prune_above = 1
        self.held: set[Work] = set()
        self.release: Callable[[Work], None] = self.held.discard
        """Releases a work that has ended or that will not begin."""

    def make(
        self,
        op: int | str,
        keep: object,
        result: Any,
        finish: Callable[[], Any] | None = None,
    ) -> CollectiveWork:
        """Makes the work of a collective that is about to begin.

        `keep` is its memory. `result` is the result if there is no `finish`. The caller sets `job`
        when it begins the call.
        """
        return CollectiveWork(self._group, op, keep, result, finish, self.release)

    def keep(self, work: Work) -> None:
        """Keeps one more work alive."""
        self.held.add(work)
        self.prune()

    def prune(self) -> None:
        """Releases the works that have ended, once the number of kept works has more than doubled
        since the previous release.
        """
        if len(self.held) > self._prune_above:
            self.release_ended()
            self._prune_above = 2 * len(self.held) + 1

    def release_ended(self) -> None:
        """Releases the works that have ended."""
        # Other threads may change the set meanwhile, so iterate over a copy of it and discard the
        # works one by one.
        for old in self.held.copy():
            if old._poll():
                self.held.discard(old)


class MessageWork(Work):
    """A pending receive into a copy of the caller's array. `finish` copies the message to the
    array.
    """

    def __init__(self, request: native.Request, finish: Callable[[], Any]) -> None:
        super().__init__(finish)
        self.request = request

    def _call(self) -> str:
        return self.request._call()

    def _wait_native(self, timeout_s: float | None) -> bool:
        return self.request._wait_native(timeout_s)

    def is_completed(self) -> bool:
        return self.request.is_completed()

    def _poll(self) -> bool:
        return self.request._poll()

    def _cannot_complete(self) -> bool:
        return self.request._cannot_complete()

    def exception(self) -> Exception | None:
        return self.request.exception()

    def _end_if_late(self, waited_s: float) -> None:
        self.request._end_if_late(waited_s)

    def cancel(self) -> bool:
        return self.request.cancel()

    def source_rank(self) -> int:
        """Returns the source rank of the message, after its arrival."""
        return self.request.source_rank()

    def tag(self) -> int:
        """Returns the tag of the message, after its arrival."""
        return self.request.tag()


class JoinedWork(Work):
    """Several pending calls as one work."""

    def __init__(self, works: Sequence[Work], finish: Callable[[], Any]) -> None:
        super().__init__(finish)
        self.works = works

    def _call(self) -> str:
        return " and ".join(work._call() for work in self.works)

    def _wait_native(self, timeout_s: float | None) -> bool:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for work in self.works:
            if not work._wait_native(_left_s(until)):
                return False
        for work in self.works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def _poll(self) -> bool:
        return all(work._poll() for work in self.works)

    # Asks only the first pending work, because `test` checks the works in order and stops there.
    def _cannot_complete(self) -> bool:
        return next((work._cannot_complete() for work in self.works if not work._poll()), False)

    def _end_if_late(self, waited_s: float) -> None:
        for work in self.works:
            work._end_if_late(waited_s)

    def exception(self) -> Exception | None:
        found = (work.exception() for work in self.works)
        return next((error for error in found if error is not None), None)

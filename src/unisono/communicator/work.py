"""Calls under way."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from unisono import errors, native
from unisono.types import Op

_OPS = tuple(Op)

_SHORTEST_NAP_S, _LONGEST_NAP_S = 10e-6, 1e-3  # between looks at calls of several kinds

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
    """The handle of an asynchronous call. The arrays belong to the call until it is complete."""

    def __init__(self, finish: Callable[[], Any] | None, result: Any = None) -> None:
        """`finish`, where there is one, is called once after the end, and returns the result."""
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
        """What was called, in words."""

    @abstractmethod
    def _wait_native(self, timeout_s: float | None) -> bool:
        """False if the time is over; raises what the call failed with."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether the call has ended, well or not."""

    @abstractmethod
    def exception(self) -> Exception | None:
        """What the call failed with, once it has ended."""

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits for the end and returns the result.

        Raises what the call failed with, or `TimeoutError` if it is still under way after
        `timeout_s` seconds, which does the call no harm; `UnisonoError` in a signal handler that
        has interrupted the end of this very method.
        """
        # Below, less than nothing means without end.
        if not self._wait_native(None if timeout_s is None else max(0.0, timeout_s)):
            raise TimeoutError(f"the call is still under way after {timeout_s:g} s (timeout)")
        if self._lock is not None:
            with self._lock:  # whichever thread comes second finds the result in its place
                self._finish_once()
        return self._result

    def _finish_once(self) -> None:
        if self._finishing:
            raise errors.UnisonoError(
                "a signal handler cannot wait for a call whose result the interrupted thread is "
                "just putting in its place"
            )
        self._finishing = True
        try:
            if self._finish is not None:
                self._result = self._finish()
                self._finish = None
        finally:
            self._finishing = False

    def result(self) -> Any:
        """The result, waiting for it if need be."""
        return self.wait()

    def test(self) -> bool:
        """Whether the call has ended, well or not; moves what can be moved without waiting."""
        return self.is_completed()

    def _poll(self) -> bool:
        """Like `test`, in passing: that its peer has left does not end it."""
        return self.is_completed()

    def _cannot_complete(self) -> bool:
        """Whether nobody is left who could end it. Collectives end by themselves."""
        return False

    def _end_if_late(self, waited_s: float) -> None:  # noqa: B027 - collectives end themselves
        """Ends what was looked at for so long, if its time is over."""

    def cancel(self) -> bool:
        """Takes a message back: a receive that no message has reached, or a send of which the
        receiver has nothing. True if it was taken back: then `wait` raises `UnisonoError`. False,
        as for all collectives, if it goes on."""
        return False

    @staticmethod
    def wait_all(works: Iterable[Work], timeout_s: float | None = None) -> list[Any]:
        """Waits for all; returns their results in order. Raises as `wait` does."""
        works = list(works)
        results: list[Any] = native.wait_all(works, timeout_s)
        if results is not NotImplemented:
            return results
        until = None if timeout_s is None else time.monotonic() + timeout_s
        return [work.wait(_left_s(until)) for work in works]

    @staticmethod
    def wait_any(works: Iterable[Work], timeout_s: float | None = None) -> int:
        """Waits until one has ended, well or not; returns its place among `works`.

        Raises `TimeoutError` if all are still under way after `timeout_s` seconds, and `ValueError`
        where there are none. Without `timeout_s` the time of their communicator ends it.
        """
        works = list(works)
        if not works:
            raise ValueError("wait_any needs works to wait for")
        found: int = native.wait_any(works, timeout_s)
        return _look_for_any(works, timeout_s) if found is NotImplemented else found


def _look_for_any(works: Sequence[Work], timeout_s: float | None) -> int:
    """Looks at calls of several kinds or communicators in turn, until one has ended."""
    began_s, nap_s = time.monotonic(), _SHORTEST_NAP_S
    while True:
        for place, work in enumerate(works):
            if work._poll():
                return place
        waited_s = time.monotonic() - began_s
        if timeout_s is not None and waited_s >= timeout_s:
            raise TimeoutError(f"all are still under way after {timeout_s:g} s (timeout)")
        for work in works:
            work._end_if_late(waited_s)
        if all(work._cannot_complete() for work in works):
            works[0].test()
        time.sleep(nap_s if timeout_s is None else min(nap_s, timeout_s - waited_s))
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)


Work.register(native.Request)  # of one message: made and waited for without Python's code


class CollectiveWork(Work):
    """A collective under way, or about to be: then it has no `job` yet. `keep` holds its memory."""

    def __init__(
        self,
        group: native.Group,
        op: int | str,
        keep: object,
        result: Any,
        finish: Callable[[], Any] | None,
        let_go: Callable[[Work], None],
    ) -> None:
        """`op` by its code or its name; `let_go` is told of the end."""
        super().__init__(finish, result)
        self._group = group
        self._op = op
        self._let_go = let_go
        self.keep = keep
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


class UnderWay:
    """Holds the arrays of calls until they have ended, even if the program drops its handles.

    They are held before a call begins; calls that C++ begins by itself, in the same step. Once it
    has begun other threads read and write them, while a signal handler may raise before the next
    step of this one: then nobody has the handle.
    """

    def __init__(self, group: native.Group) -> None:
        self._group = group
        self._crowd = 1
        self.held: set[Work] = set()
        self.let_go: Callable[[Work], None] = self.held.discard
        """For a work that has ended, or that will not begin."""

    def make(
        self,
        op: int | str,
        keep: object,
        result: Any,
        finish: Callable[[], Any] | None = None,
    ) -> CollectiveWork:
        """The work of a collective that is about to begin; `keep` is its memory, `result` what
        `finish` need not find. Who begins it gives it its `job`."""
        return CollectiveWork(self._group, op, keep, result, finish, self.let_go)

    def keep(self, work: Work) -> None:
        """Holds one more."""
        self.held.add(work)
        self.prune()

    def prune(self) -> None:
        """Lets go of those that have ended since they were half as many."""
        if len(self.held) <= self._crowd:
            return
        # Step by step, and from a copy: other threads may be doing the same.
        for old in self.held.copy():
            if old._poll():
                self.held.discard(old)
        self._crowd = 2 * len(self.held) + 1


class MessageWork(Work):
    """A receive under way whose array is not where it is received."""

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
        """The rank that the message came from, once it has come."""
        return self.request.source_rank()

    def tag(self) -> int:
        """The tag of the message, once it has come."""
        return self.request.tag()


class JoinedWork(Work):
    """Several calls under way as one."""

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

    def _cannot_complete(self) -> bool:  # as `test`, which gets no further than the first
        return next((work._cannot_complete() for work in self.works if not work._poll()), False)

    def _end_if_late(self, waited_s: float) -> None:
        for work in self.works:
            work._end_if_late(waited_s)

    def exception(self) -> Exception | None:
        found = (work.exception() for work in self.works)
        return next((error for error in found if error is not None), None)

"""Handles of submitted tensors, and flights. A flight is one collective in progress."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from unisono import native
from unisono.controller.request import Request
from unisono.controller.transfers.transfer import Array, Pending, PendingVote
from unisono.errors import UnisonoError

IN_PLACE = ("all_reduce", "broadcast")
"""Operations that change their arrays. Others return new arrays."""


class Owner(Protocol):
    """The methods of the controller's loop that a handle calls."""

    def wait_for_flight(self, handle: Handle, timeout_s: float | None, is_late: bool) -> None:
        """Waits until the handle has a flight (its collective has begun) or has ended. Raises
        `TimeoutError`.

        `is_late`: `look_for_late_ranks` was called for this handle.
        """

    waits: int
    """Number of times that the program has waited for a tensor. A tensor has the number at its
    submission as its phase."""

    @property
    def stall_warning_s(self) -> float:
        """Seconds after which a handle reports a collective that has not ended."""

    def look_for_late_ranks(self, handle: Handle) -> None:
        """Finds the ranks that have not begun the collective of this handle, and logs them."""

    def fail(self, error: Exception) -> None:
        """Fails all handles with an error that ends the controller."""


class Handle:
    """A submitted tensor. The program must not use the array until `wait` has returned."""

    __slots__ = ("_done", "_error", "_owner", "_result", "array", "flight", "request")

    def __init__(self, owner: Owner, request: Request, array: Array) -> None:
        self._owner = owner
        self.request = request
        self.array = array
        self.flight: Flight | None = None
        self._done = False
        self._error: Exception | None = None
        self._result: Any = array

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self._done else "pending"
        return f"<Handle: {self.request.operation} of {self.name!r}, {state}>"

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.request.name

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits until the tensor has ended, and returns the result.

        If the tensor is reduced in place, the result is the submitted array. Raises the tensor's
        error. After a `MismatchError`, which means that the ranks disagree about the tensor, the
        controller stays usable. Any other `CommunicationError` ends the controller. Raises
        `TimeoutError` after `timeout_s` seconds; the tensor continues.
        """
        if not self._done:
            self._owner.waits += 1
        warn_s, is_late = self._owner.stall_warning_s, False
        while not self._done:
            flight = self.flight
            if flight is None:
                self._owner.wait_for_flight(self, timeout_s, is_late)
                continue
            try:
                flight.settle(warn_s if timeout_s is None else min(timeout_s, warn_s))
            except TimeoutError:
                if timeout_s is not None and timeout_s <= warn_s:
                    raise
                is_late = True
                self._owner.look_for_late_ranks(self)
                flight.settle(None if timeout_s is None else timeout_s - warn_s)
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def done(self) -> bool:
        """True if the tensor has completed or failed. Does not wait."""
        if not self._done and (flight := self.flight) is not None and flight.has_ended():
            flight.settle(None)
        return self._done

    @property
    def exception(self) -> Exception | None:
        """Error of a failed tensor; None if the tensor has not failed."""
        return self._error if self.done else None

    def complete(self, result: Any) -> None:
        """Ends the handle with a result."""
        self._result = result
        self._done = True
        self.flight = None

    def fail(self, error: Exception) -> None:
        """Ends the handle with an error."""
        if not self._done:
            self._error, self._done, self.flight = error, True, None


# Slots of handles. One call writes the slots of all handles of a flight.
_DONE = native.SlotColumn(Handle, "_done")
_FLIGHT = native.SlotColumn(Handle, "flight")


class Flight:
    """A collective in progress, with the handles of its tensors."""

    __slots__ = (
        "_divisor", "_is_in_place", "_lock", "_on_end", "_settled", "handles", "pending", "ran"
    )  # fmt: skip

    def __init__(
        self,
        handles: tuple[Handle, ...],
        pending: Pending | PendingVote,
        on_end: Callable[[Flight], None],
        in_place: bool,
        *,
        divisor: int = 1,
    ) -> None:
        """`on_end` is called once, when the flight has ended. `in_place`: the operation changes the
        arrays. `divisor` divides the resulting sums, to give averages.
        """
        self.handles = handles
        self.pending: Pending | PendingVote | None = pending
        """The collective; None after a failure."""
        self.ran = True
        self._divisor = divisor
        self._is_in_place = in_place
        self._on_end = on_end
        self._lock = threading.Lock()
        self._settled = False

    def has_settled(self) -> bool:
        """Returns True if `settle` has processed the end of the flight."""
        return self._settled

    def has_ended(self) -> bool:
        """Returns True if the collective has completed or failed."""
        pending = self.pending
        return self._settled or pending is None or pending.is_completed()

    def settle(self, timeout_s: float | None) -> None:
        """Waits for the end of the flight, then ends its handles. Raises `TimeoutError`.

        A void flight moved no data, because a rank was not ready; its handles wait for another
        flight. A failure ends the controller, and the handles have the error.
        """
        if self._settled or self.pending is None:
            return
        try:
            result = self.pending.wait(timeout_s)
        except TimeoutError as error:
            if not isinstance(error, UnisonoError):
                raise  # only the wait ends; the collective continues
            self._fail(error)
            return
        except UnisonoError as error:
            self._fail(error)
            return
        with self._lock:
            if self.has_settled():
                return
            self.ran = getattr(self.pending, "ran", True)
            if self.ran and self._divisor == 1 and self._is_in_place:
                # The results are the arrays that were submitted. For one handle, Python takes less
                # time than calls of the core.
                if len(self.handles) == 1:
                    self.handles[0]._done, self.handles[0].flight = True, None
                else:
                    _DONE.fill(self.handles, True)
                    _FLIGHT.fill(self.handles, None)
            else:
                for handle in self.handles:
                    self._end(handle, result)
            self._settled = True
        self._on_end(self)

    def _end(self, handle: Handle, result: Any) -> None:
        if not self.ran:
            handle.flight = None
            return
        if self._divisor > 1:
            _divide(handle.array, self._divisor)
        handle.complete(handle.array if self._is_in_place else result)

    def _fail(self, error: UnisonoError) -> None:
        for handle in self.handles:
            handle.fail(error)
        self._settled = True
        self.pending = None  # breaks a cycle: its error's traceback refers to this flight
        if self.handles:
            self.handles[0]._owner.fail(error)
        self._on_end(self)


def _divide(array: Any, divisor: int) -> None:
    array /= divisor

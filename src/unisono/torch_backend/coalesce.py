"""Coalescing: records calls between start and end, and issues them in order at the end."""

from __future__ import annotations

from typing import Any

from unisono.errors import UnisonoError
from unisono.torch_backend.call_tracing import CALLS
from unisono.torch_backend.private import hide_from_dynamo


class Deferred:
    """The handle of a recorded call, for use after the call was issued."""

    __slots__ = ("__weakref__", "_handle")

    def __init__(self) -> None:
        self._handle: Any = None

    def bind(self, handle: Any) -> None:
        """Sets the handle of the issued call."""
        self._handle = handle

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits for the issued call."""
        return self._issued().wait(timeout_s)

    def is_completed(self) -> bool:
        """Returns True if the call was issued and has ended."""
        return self._handle is not None and bool(self._handle.is_completed())

    def exception(self) -> Exception | None:
        """Returns the failure of the issued call, else None."""
        error: Exception | None = None if self._handle is None else self._handle.exception()
        return error

    def source_rank(self) -> int:
        """Returns the source rank of an issued receive."""
        return int(self._issued().source_rank())

    def _issued(self) -> Any:
        if self._handle is None:
            raise UnisonoError("this call is being coalesced: wait after the coalescing block")
        return self._handle


class CoalescedCalls:
    """Replaces the communicator while calls are coalesced, and records the calls.

    So calls outside coalescing need not check whether they are coalesced.
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Deferred]] = []

    def __getattr__(self, name: str) -> Any:
        target = getattr(self.comm, name)
        if name not in CALLS:
            return target

        def record(*args: Any, async_op: bool = False, **options: Any) -> Deferred:
            deferred = Deferred()
            self._calls.append((target, args, options, deferred))
            return deferred

        return record

    def issue(self) -> list[Any]:
        """Issues the recorded calls in order and returns their handles."""
        for call, args, options, deferred in self._calls:
            deferred.bind(call(*args, async_op=True, **options))
        return [deferred for *_, deferred in self._calls]


hide_from_dynamo(Deferred, CoalescedCalls)

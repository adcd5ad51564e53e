"""The methods of executors that `unisono.run` and the planner call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Future(Protocol):
    """A submitted call, such as a `concurrent.futures.Future`."""

    def done(self) -> bool:
        """Returns True if the call has ended."""

    def result(self) -> Any:
        """Returns the call's result, or raises its error."""

    def cancel(self) -> Any:
        """Tries to prevent a call that has not begun."""


class Executor(Protocol):
    """Something that calls functions on hosts, such as a `concurrent.futures.Executor`, a Dask
    client, or mpi4py's `MPIPoolExecutor`.

    Unisono must be installed where it runs the calls. For `unisono.run`, it must run as many calls
    at a time as there are ranks.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future:
        """Begins the call `fn(*args)` on a worker."""

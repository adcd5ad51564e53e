"""The methods of executors that `unisono.run` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class RankFuture(Protocol):
    """A submitted call, such as a `concurrent.futures.Future`."""

    def done(self) -> bool:
        """Returns True if the call has ended."""

    def result(self) -> Any:
        """Returns the call's result, or raises its error."""

    def cancel(self) -> Any:
        """Tries to prevent a call that has not begun."""


class RankExecutor(Protocol):
    """Something that calls functions on hosts, such as a `concurrent.futures.Executor`, a Dask
    client, or mpi4py's `MPIPoolExecutor`.

    It must run as many calls at a time as there are ranks, and unisono must be installed where it
    runs them.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> RankFuture:
        """Begins the call `fn(*args)` on a worker."""

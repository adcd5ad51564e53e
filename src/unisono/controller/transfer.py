"""Transfers: what moves a controller's data. An implementation needs the methods of `Transfer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

Array = Any
"""A NumPy array or a torch tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One collective: the same on all ranks, but for the contents of `arrays`.

    An all_reduce may have several arrays, reduced in place. The others have one. `lengths`: the
    rows of each rank in an all_gather whose ranks differ.
    """

    operation: str
    arrays: tuple[Array, ...]
    op: str = "sum"
    root: int = -1
    lengths: tuple[int, ...] = ()
    key: object = None
    """Equal for jobs that repeat with arrays of the same types and lengths. None: no repetition."""


class Pending(Protocol):
    """A job that has begun."""

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits for the end; returns the result of a job that is not in place.

        Raises `TimeoutError` after `timeout_s` seconds, and the job's own error.
        """

    def is_completed(self) -> bool:
        """Whether the job has ended, well or not."""


class PendingVote(Pending, Protocol):
    """A voted job that has begun."""

    @property
    def ran(self) -> bool:
        """Whether all ranks were ready. If not, no array has changed."""


class Transfer(Protocol):
    """Runs the jobs of one rank in the order in which they begin. All ranks begin the same jobs."""

    def begin(self, job: Job) -> Pending:
        """Begins a job for which all ranks are known to be ready. Does not wait for them."""

    def begin_voted(self, job: Job | None) -> PendingVote:
        """Begins a job that runs only if all ranks give a job. None: this rank is not ready.

        Jobs of `begin` and of `begin_voted` have no order between each other.
        """

    def forget(self) -> None:
        """Drops what was kept for the keys of jobs: none of them comes again."""

    def close(self) -> None:
        """Ends the transfer. Jobs that are under way fail."""

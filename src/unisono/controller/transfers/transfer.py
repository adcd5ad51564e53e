"""Transfers: what moves a controller's data. An implementation needs the methods of `Transfer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

Array = Any
"""A NumPy array or a torch tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One collective: the same on all ranks, but for the contents of `arrays`.

    An all_reduce may have several arrays, reduced in place. The others have one. `lengths`: the
    rows of each rank in an all_gather whose ranks differ. `names`: those of the tensors, if known.
    """

    operation: str
    arrays: tuple[Array, ...]
    op: str = "sum"
    root: int = -1
    lengths: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


class Pending(Protocol):
    """A job that has begun."""

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits for the end; returns the result of a job that is not in place.

        Raises `TimeoutError` after `timeout_s` seconds, and the job's own error.
        """

    def is_completed(self) -> bool:
        """Returns True if the job has ended, well or not."""


class PendingVote(Pending, Protocol):
    """A voted job that has begun.

    It may have a method `times_ns`, which returns when its data began to move and when it ended, by
    `time.monotonic_ns`; None: not known. The tuning of fusion needs the times.
    """

    @property
    def ran(self) -> bool:
        """True if all ranks were ready. If not, no array has changed."""


class VotedJob(Protocol):
    """A job that a frozen plan repeats. Each run happens only if all ranks are ready for it."""

    def begin(self, arrays: tuple[Array, ...]) -> PendingVote:
        """Begins a run with arrays of the types and shapes of the first. The last run has ended."""


class Transfer(Protocol):
    """Runs the jobs of one rank in the order in which they begin. All ranks begin the same jobs.

    Decided jobs and voted jobs have no order between each other.
    """

    def begin(self, job: Job) -> Pending:
        """Begins a job for which all ranks are known to be ready. Does not wait for them."""

    def prepare(self, job: Job) -> VotedJob:
        """Prepares a voted job, which runs only if all ranks are ready. Does not begin it."""

    def begin_void(self) -> PendingVote:
        """Begins the voted job that is next, as a rank that is not ready: it runs on no rank."""

    def close(self) -> None:
        """Ends the transfer. Jobs that are under way fail."""


class RemadeJob:
    """A voted job of a transfer that keeps nothing between the runs."""

    def __init__(self, begin: Callable[[Job], PendingVote], job: Job) -> None:
        """`begin` begins a voted job."""
        self._begin = begin
        self._job = replace(job, arrays=())

    def begin(self, arrays: tuple[Array, ...]) -> PendingVote:
        """Begins a run with these arrays."""
        return self._begin(replace(self._job, arrays=arrays))

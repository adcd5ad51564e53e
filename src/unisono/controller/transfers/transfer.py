"""The interfaces of transfers, which move a controller's data, and of their jobs. An implementation
has the methods of `Transfer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

Array = Any
"""A NumPy array or a torch tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One collective. Only the contents of `arrays` differ between the ranks.

    An all_reduce may have several arrays, which are reduced in place. Other operations have one
    array. `lengths` are the rows of each rank in an all_gather with unequal arrays. `names` are the
    names of the tensors, if known.
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
        """Waits for the job. Returns its result, unless the job changes its arrays in place.

        Raises `TimeoutError` after `timeout_s` seconds, and the job's own error.
        """

    def is_completed(self) -> bool:
        """Returns True if the job has completed or failed."""


class PendingVote(Pending, Protocol):
    """A run of a voted job that has begun. The job changes arrays only if all ranks are ready.

    The run may have a method `times_ns`. It returns the `time.monotonic_ns` at which the data began
    and ended to move, or None if these times are not known. The fusion tuner needs them.
    """

    @property
    def ran(self) -> bool:
        """True if all ranks were ready. If not, no array has changed."""


class VotedJob(Protocol):
    """A job that a frozen plan repeats. Each run happens only if all ranks are ready for it."""

    def begin(self, arrays: tuple[Array, ...]) -> PendingVote:
        """Begins a run with arrays of the types and shapes for which the job was prepared. The
        program must have waited for the previous run.
        """

    def begin_void(self) -> PendingVote:
        """Votes against the run, because this rank is not ready. The job then runs on no rank. The
        program must have waited for the previous run.
        """


class Transfer(Protocol):
    """Runs the jobs of one rank in the order in which they begin. All ranks begin the same jobs.

    Decided jobs (`begin`) and voted jobs (`prepare`) are not ordered with each other.
    """

    def begin(self, job: Job) -> Pending:
        """Begins a job for which all ranks are known to be ready. Does not wait for them."""

    def prepare(self, job: Job) -> VotedJob:
        """Prepares a voted job, which runs only if all ranks are ready. Does not begin it."""

    def close(self) -> None:
        """Ends the transfer. Jobs in progress fail."""


class RemadeJob:
    """A voted job for transfers that cannot prepare jobs. Each run begins a new job."""

    def __init__(self, begin: Callable[[Job | None], PendingVote], job: Job) -> None:
        """`begin` is the transfer's function that begins a voted job. None is a vote against the
        job.
        """
        self._begin = begin
        self._job = replace(job, arrays=())

    def begin(self, arrays: tuple[Array, ...]) -> PendingVote:
        """Begins a run with these arrays."""
        return self._begin(replace(self._job, arrays=arrays))

    def begin_void(self) -> PendingVote:
        """Votes against the run."""
        return self._begin(None)

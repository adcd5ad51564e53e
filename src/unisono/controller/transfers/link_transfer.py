"""A transfer that emulates a slower link, for experiments with a controller."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono.controller.fusion.fusion_times import LinkCost
from unisono.controller.transfers.transfer import (
    Array,
    Job,
    Pending,
    PendingVote,
    Transfer,
    VotedJob,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """One collective that the emulated link carried. Times are those of `time.perf_counter`."""

    begun_s: float
    ended_s: float
    tensors: int
    nbytes: int


class LinkTransfer:
    """Runs jobs with another transfer, and delays the end of each job until a link of `cost` would
    have carried it.

    The link carries one job at a time, in the order in which jobs begin. A void job takes no time.
    """

    def __init__(self, transfer: Transfer, cost: LinkCost) -> None:
        self.cost = cost
        self.uses: list[LinkUse] = []
        """Collectives so far. The caller may clear the list."""
        self.enabled = True
        """True if the link delays jobs."""
        self._transfer = transfer
        self._free_s = 0.0

    def begin(self, job: Job) -> Pending:
        """Begins a job for which all ranks are ready."""
        return _OnLink(self._transfer.begin(job), *self._times_s(job.arrays))

    def prepare(self, job: Job) -> VotedJob:
        """Prepares a voted job. The link carries each of its runs."""
        return _VotedJobOnLink(self._transfer.prepare(job), self._times_s)

    def close(self) -> None:
        """Closes the transfer that runs the jobs."""
        self._transfer.close()

    def _times_s(self, arrays: tuple[Array, ...]) -> tuple[float, float]:
        """Returns the times at which the link begins and finishes carrying the arrays."""
        now_s = time.perf_counter()
        if not self.enabled:
            return now_s, now_s
        nbytes = sum(array.nbytes for array in arrays)
        begun_s = max(now_s, self._free_s)
        self._free_s = begun_s + self.cost.time_s(nbytes)
        self.uses.append(
            LinkUse(begun_s=begun_s, ended_s=self._free_s, tensors=len(arrays), nbytes=nbytes)
        )
        return begun_s, self._free_s


class _VotedJobOnLink:
    """A voted job, each run of which ends when the emulated link has carried it."""

    def __init__(
        self, job: VotedJob, times_s: Callable[[tuple[Array, ...]], tuple[float, float]]
    ) -> None:
        self._job = job
        self._times_s = times_s

    def begin(self, arrays: tuple[Array, ...]) -> PendingVote:
        return _OnLink(self._job.begin(arrays), *self._times_s(arrays))

    def begin_void(self) -> PendingVote:
        now_s = time.perf_counter()
        return _OnLink(self._job.begin_void(), now_s, now_s)


class _OnLink:
    """A job that has begun, and the times at which the link carries it."""

    def __init__(self, pending: Pending | PendingVote, begun_s: float, due_s: float) -> None:
        self._pending = pending
        self._begun_s = begun_s
        self._due_s = due_s

    def wait(self, timeout_s: float | None = None) -> Any:
        begun_s = time.perf_counter()
        result = self._pending.wait(timeout_s)
        left_s = self._due_s - time.perf_counter()
        if left_s > 0 and self.ran:
            if timeout_s is not None and self._due_s - begun_s > timeout_s:
                raise TimeoutError(f"the link is still busy: timeout after {timeout_s:g} s")
            time.sleep(left_s)
        return result

    def is_completed(self) -> bool:
        if not self._pending.is_completed():
            return False
        return not self.ran or time.perf_counter() >= self._due_s

    def times_ns(self) -> tuple[int, int] | None:
        """Returns the `time.monotonic_ns` at which the link begins and ends its work on the job."""
        return round(self._begun_s * 1e9), round(self._due_s * 1e9)

    @property
    def ran(self) -> bool:
        return getattr(self._pending, "ran", True)

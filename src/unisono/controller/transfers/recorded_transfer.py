"""Records a controller's collectives in the rank's timeline, for any transfer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from unisono.controller.transfers.transfer import (
    Array,
    Job,
    Pending,
    PendingVote,
    Transfer,
    VotedJob,
)
from unisono.timeline import EventKind, TimelineWriter

# Event kinds as plain integers. To read a kind from the enumeration at each event would add half of
# the time that it takes to record the event.
_LAUNCHED, _FUSED = int(EventKind.LAUNCHED), int(EventKind.FUSED)
_WAITED, _TRANSFERRED = int(EventKind.WAITED), int(EventKind.TRANSFERRED)
_PLANNED = int(EventKind.PLANNED)

_NO_TENSOR = "(no tensor)"
_RUNS_BETWEEN_PLANS = 32


class RecordedTransfer:
    """A transfer that records the begin, the end and the waits of each collective."""

    def __init__(self, inner: Transfer, timeline: TimelineWriter) -> None:
        """`close` closes `inner`."""
        self._inner = inner
        self._timeline = timeline
        self.close = inner.close

    def begin(self, job: Job) -> RecordedPending:
        """Begins a job for which all ranks are ready."""
        timeline = self._timeline
        number = timeline.next_number()
        first = job.names[0] if job.names else _NO_TENSOR
        timeline.record(_LAUNCHED, first, number)
        for name, array in zip(job.names, job.arrays, strict=False):
            timeline.record(_FUSED, name, number, array.nbytes)
        launched_ns = time.monotonic_ns()
        return RecordedPending(self._inner.begin(job), timeline, first, number, launched_ns)

    def prepare(self, job: Job) -> VotedJob:
        """Prepares a voted job that will run many times."""
        return _RecordedVotedJob(self._inner.prepare(job), self._timeline, job)


class _RecordedVotedJob:
    """A voted job whose runs are recorded. The job carries a bucket of a plan, and the tensors of
    the bucket are recorded only in every 32nd run.
    """

    __slots__ = ("_bucket", "_first", "_inner", "_names", "_runs", "_timeline")

    def __init__(self, inner: VotedJob, timeline: TimelineWriter, job: Job) -> None:
        self._inner = inner
        self._timeline = timeline
        self._bucket = timeline.next_number()
        self._names = job.names
        self._first = job.names[0] if job.names else _NO_TENSOR
        self._runs = 0

    def begin(self, arrays: tuple[Array, ...]) -> RecordedPending:
        """Begins a run with these arrays."""
        timeline = self._timeline
        if self._runs % _RUNS_BETWEEN_PLANS == 0:
            self._record_plan(arrays)
        self._runs += 1
        number = timeline.next_number()
        timeline.record(_LAUNCHED, self._first, number, self._bucket)
        launched_ns = time.monotonic_ns()
        pending = self._inner.begin(arrays)
        return RecordedPending(pending, timeline, self._first, number, launched_ns)

    def begin_void(self) -> RecordedPending:
        """Votes against the run."""
        number = self._timeline.next_number()
        self._timeline.record(_LAUNCHED, _NO_TENSOR, number)
        launched_ns = time.monotonic_ns()
        pending = self._inner.begin_void()
        return RecordedPending(pending, self._timeline, _NO_TENSOR, number, launched_ns)

    def _record_plan(self, arrays: Sequence[Array]) -> None:
        for name, array in zip(self._names, arrays, strict=False):
            self._timeline.record(_PLANNED, name, self._bucket, array.nbytes)


class RecordedPending:
    """A job that has begun. The first successful `wait` records the job."""

    __slots__ = ("_inner", "_launched_ns", "_name", "_number", "_recorded", "_timeline")

    def __init__(
        self,
        inner: Pending | PendingVote,
        timeline: TimelineWriter,
        name: str,
        number: int,
        launched_ns: int,
    ) -> None:
        self._inner = inner
        self._timeline = timeline
        self._name = name
        self._number = number
        self._launched_ns = launched_ns
        self._recorded = False

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits for the job, and records the wait."""
        if self._recorded:
            return self._inner.wait(timeout_s)
        record, name, number = self._timeline.record, self._name, self._number
        begun_ns = time.monotonic_ns()
        try:
            result = self._inner.wait(timeout_s)
        finally:
            ended_ns = time.monotonic_ns()
            record(_WAITED, name, number, 0, begun_ns, ended_ns)
        if not self._recorded:
            self._recorded = True
            moved_ns, moved_until_ns = self.times_ns() or (self._launched_ns, ended_ns)
            record(_TRANSFERRED, name, number, self.ran, moved_ns, moved_until_ns)
        return result

    def is_completed(self) -> bool:
        """Returns True if the job has completed or failed."""
        return self._inner.is_completed()

    @property
    def ran(self) -> bool:
        """True if all ranks were ready."""
        return bool(getattr(self._inner, "ran", True))

    def times_ns(self) -> tuple[int, int] | None:
        """Returns the times at which the data moved, or None if they are not known."""
        times_ns = getattr(self._inner, "times_ns", None)
        found: tuple[int, int] | None = None if times_ns is None else times_ns()
        return found

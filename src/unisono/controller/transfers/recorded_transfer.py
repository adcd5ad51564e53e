"""Records a controller's collectives in the rank's timeline, for any transfer."""

from __future__ import annotations

import time

from unisono import native
from unisono.controller.transfers.transfer import Job, Pending, Transfer, VotedJob
from unisono.timeline import EventKind, TimelineWriter

_NO_TENSOR = "(no tensor)"


def recorded(transfer: Transfer, timeline: TimelineWriter) -> Transfer:
    """Returns the transfer, with its collectives recorded if the timeline records events."""
    return transfer if timeline.ring is None else RecordedTransfer(transfer, timeline)


class RecordedTransfer:
    """A transfer that records the begin, the end and the waits of each collective.

    The native core writes the records, because Python would take longer than a small collective.
    """

    def __init__(self, inner: Transfer, timeline: TimelineWriter) -> None:
        """`close` closes `inner`. `timeline` must have a ring, that is, record events."""
        assert timeline.ring is not None
        self._inner = inner
        self._timeline = timeline
        self._recorder = native.RunRecorder(timeline.ring)
        self.close = inner.close

    def begin(self, job: Job) -> Pending:
        """Begins a job for which all ranks are ready."""
        timeline = self._timeline
        number = timeline.next_number()
        first = job.names[0] if job.names else _NO_TENSOR
        timeline.record(EventKind.LAUNCHED, first, number)
        for name, array in zip(job.names, job.arrays, strict=False):
            timeline.record(EventKind.FUSED, name, number, array.nbytes)
        launched_ns = time.monotonic_ns()
        return self._recorder.run(self._inner.begin(job), first, number, launched_ns)

    def prepare(self, job: Job) -> VotedJob:
        """Prepares a voted job that will run many times."""
        timeline = self._timeline
        return self._recorder.job(
            self._inner.prepare(job),
            timeline.next_number(),
            timeline.next_number,
            job.names,
            [array.nbytes for array in job.arrays],
            _NO_TENSOR,
        )

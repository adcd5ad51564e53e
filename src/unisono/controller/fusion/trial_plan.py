"""One rank's frozen plan in a trial. The tensors may be in other buckets in the next pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from unisono.controller.frozen_plan import FrozenPlan, PlannedBucket, PlannedTensor
from unisono.controller.fusion.buckets import Bucket
from unisono.controller.fusion.fusion_trial import PassTimes, Trial, TrialClock
from unisono.controller.handle import Flight, Handle
from unisono.controller.request import Request
from unisono.controller.transfers.transfer import Job, PendingVote, Transfer


class TrialPlan(FrozenPlan):
    """Runs the passes of a trial, measures them, and launches nothing after the last one."""

    def __init__(
        self,
        epoch: int,
        buckets: Sequence[Bucket],
        transfer: Transfer,
        on_end: Callable[[Flight], None],
        stand_in: Callable[[Sequence[Request]], Job],
        trial: Trial,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`now_ns` reads the clock that the transfer's `times_ns` uses."""
        super().__init__(epoch, buckets, transfer, on_end, stand_in)
        own, tensors = self._buckets, self.tensors
        other = tuple(
            PlannedBucket(tuple(tensors[name] for name in bucket.names)) for bucket in trial.other
        )
        self._choices = (own, other)
        self._order = trial.order
        self.finished = False
        """True if all passes were launched. Later tensors wait for the next plan."""
        self._pass = 0
        self._which = 0
        """Index of the buckets that this pass uses: 0 for the plan's own, 1 for the trial's
        other."""
        self._numbers = {name: number for number, name in enumerate(tensors)}
        self._clock = TrialClock(trial, len(tensors), len(own), now_ns)
        self._use(trial.order[0])

    @property
    def flights(self) -> list[Flight]:
        """The most recent flight (collective in progress) of each bucket that was launched."""
        every = (bucket for buckets in self._choices for bucket in buckets)
        return [bucket.flight for bucket in every if bucket.flight is not None]

    @property
    def has_waiting(self) -> bool:
        """True if tensors wait for other tensors or ranks. Always True after the last pass, because
        all tensors then wait for the next plan.
        """
        return self.finished or super().has_waiting

    def add(self, tensor: PlannedTensor, handle: Handle) -> None:
        """Adds a tensor to its bucket, and launches the buckets that are full, in order."""
        self._clock.note_submission(self._numbers[tensor.request.name])
        super().add(tensor, handle)

    def times(self) -> PassTimes:
        """Returns what this rank has measured, once the plan is `finished`."""
        return self._clock.times()

    def _launch(
        self, bucket: PlannedBucket, handles: tuple[Handle, ...], pending: PendingVote
    ) -> None:
        super()._launch(bucket, handles, pending)
        self._clock.note_launch(pending)
        if self._place == 0:
            self._end_pass()

    def _end_pass(self) -> None:
        self._clock.end_pass()
        self._release()
        self._pass += 1
        if self._pass == len(self._order):
            self.finished = self.stopped = True
            return
        if self._order[self._pass] != self._which:
            self._use(self._order[self._pass])

    def _use(self, which: int) -> None:
        """Makes the plan use its own buckets (`which` = 0) or the trial's other ones (1). Tensors
        that were already submitted for this pass move to these buckets too.
        """
        self._which, self._buckets = which, self._choices[which]
        for bucket in self._buckets:
            for tensor in bucket.tensors:
                tensor.bucket = bucket
            bucket.missing = sum(tensor.handle is None for tensor in bucket.tensors)

    def _release(self) -> None:
        """Drops ended flights of the buckets that this pass did not use, because flights keep their
        arrays in memory.
        """
        for bucket in self._choices[1 - self._which]:
            flight = bucket.flight
            if flight is not None and flight.has_settled() and flight.ran:
                bucket.flight = None

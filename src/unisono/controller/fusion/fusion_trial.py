"""Trials: passes of a frozen plan, some with other buckets, whose times each rank measures."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from unisono.controller.fusion.buckets import Bucket
from unisono.controller.transfers.transfer import Pending

UNKNOWN = -1
"""Time of a bucket that is not known, because the transfer does not report the end of a job."""

_MOST_BUCKETS = 256  # maximum number of buckets of one pass whose times a rank reports


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan of limited length. Some of its passes put the same tensors into other buckets.

    A pass runs each tensor once. `order` has an entry for each pass: 0 for the plan's own buckets,
    1 for `other`. With `details`, the ranks measure tensors and buckets, not only steps.
    """

    other: tuple[Bucket, ...]
    order: tuple[int, ...]
    details: bool


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Times that one rank measured in the passes of a trial, in nanoseconds."""

    step_ns: tuple[int, ...]
    """Time of each pass except the last, from its first tensor to the first tensor of the next
    pass."""
    ready_ns: tuple[int, ...]
    """Time from the first tensor of a pass to each tensor, in the order of the plan's own buckets:
    the median over the passes that use these buckets. Empty without `details`."""
    bucket_ns: tuple[tuple[int, ...], ...]
    """Times of the `sampled` buckets of each pass except the last. The time of a bucket begins when
    this rank is ready for it and the previous bucket has ended."""


def sampled(buckets: int) -> range:
    """Returns the indices of the buckets whose times are reported: at most 256, evenly spaced.

    >>> list(sampled(3)), len(sampled(1000))
    ([0, 1, 2], 250)
    """
    return range(0, buckets, 1 + (buckets - 1) // _MOST_BUCKETS)


class TrialClock:
    """Records the times of one rank in the passes of a trial."""

    def __init__(
        self,
        trial: Trial,
        tensors: int,
        own_buckets: int,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`tensors` is the number of tensors of the plan. `now_ns` reads the clock that
        `PendingVote.times_ns` uses.
        """
        self._trial = trial
        self._now_ns = now_ns
        self._counts = (own_buckets, len(trial.other))
        passes = len(trial.order)
        self._last_ns = 0
        self._submissions = [0] * tensors
        self._begun_ns: list[int | None] = [None] * (passes + 1)
        self._submitted_ns = [[0] * tensors for _ in range(passes if trial.details else 0)]
        self._launches: deque[list[tuple[int, Pending]]] = deque([[]])
        """Launches of the current and the previous pass. Each has the time at which this rank was
        ready, and the launched job."""
        self._before_ns: int | None = 0
        """Time at which the previous bucket ended."""
        self._bucket_ns: list[tuple[int, ...]] = []

    def note_submission(self, tensor: int) -> None:
        """Records the submission of a tensor, given by its index in the plan."""
        now_ns = self._last_ns = self._now_ns()
        number = self._submissions[tensor]  # this tensor's pass; others may be one pass behind
        self._submissions[tensor] = number + 1
        if number >= len(self._trial.order):
            return
        if self._begun_ns[number] is None:
            self._begun_ns[number] = now_ns
        if self._trial.details:
            self._submitted_ns[number][tensor] = now_ns

    def note_launch(self, pending: Pending) -> None:
        """Records the launch of the next bucket. The most recent submission counts as the time at
        which this rank was ready for the bucket.
        """
        if self._trial.details:
            self._launches[-1].append((self._last_ns, pending))

    def end_pass(self) -> None:
        """Ends a pass, whose buckets were all launched, and records the bucket times of the
        previous pass, whose buckets have all ended.
        """
        if len(self._launches) == 2:
            which = self._trial.order[len(self._bucket_ns)]
            times = [self._duration_ns(*launch) for launch in self._launches.popleft()]
            some = sampled(self._counts[which]) if times else ()
            self._bucket_ns.append(tuple(times[index] for index in some))
        self._launches.append([])

    def _duration_ns(self, ready_ns: int, pending: Pending) -> int:
        before_ns, self._before_ns = self._before_ns, _ended_ns(pending)
        if before_ns is None or self._before_ns is None:
            return UNKNOWN
        return max(0, self._before_ns - max(before_ns, ready_ns))

    def times(self) -> PassTimes:
        """Returns the measured times, after all passes were launched."""
        begun = [at for at in self._begun_ns if at is not None]
        steps = tuple(after - at for at, after in pairwise(begun))
        if not self._trial.details:
            return PassTimes(steps, (), ())
        return PassTimes(steps, self._ready_ns(begun), tuple(self._bucket_ns))

    def _ready_ns(self, begun: Sequence[int]) -> tuple[int, ...]:
        own = [number for number, which in enumerate(self._trial.order) if which == 0]
        return tuple(
            round(median(self._submitted_ns[number][tensor] - begun[number] for number in own))
            for tensor in range(len(self._submissions))
        )


def _ended_ns(pending: Pending) -> int | None:
    times_ns = getattr(pending, "times_ns", None)
    if times_ns is None or not pending.is_completed():
        return None
    found: tuple[int, int] | None = times_ns()
    return None if found is None else found[1]

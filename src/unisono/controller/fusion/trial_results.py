"""Combines the measurements of all ranks in a trial."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unisono.controller.fusion.buckets import Bucket
from unisono.controller.fusion.fusion_trial import UNKNOWN, PassTimes, Trial, sampled


def pair_times(
    order: Sequence[int], steps_s: Sequence[float], block: int
) -> list[tuple[float, float]]:
    """Returns the mean step time with the old and with the new buckets, for each pair of blocks.

    >>> pair_times([1, 1, 1, 0, 0, 0, 0], [9, 2, 4, 9, 6, 8], block=3)
    [(7.0, 3.0)]
    """
    found: list[tuple[float, float]] = []
    for begin in range(0, len(order) - 1, 2 * block):
        means = [0.0, 0.0]
        for first in (begin, begin + block):
            means[order[first]] = sum(steps_s[first + 1 : first + block]) / (block - 1)
        found.append((means[0], means[1]))
    return found


def slowest_s(by_rank: Sequence[Sequence[int]]) -> list[float]:
    """Returns the largest value of all ranks at each index, converted from ns to seconds."""
    return [max(values) / 1e9 for values in zip(*by_rank, strict=True)]


def bucket_times(
    own: Sequence[Bucket], trial: Trial, times: Sequence[PassTimes], first: int
) -> tuple[list[float], list[float]]:
    """Returns the sizes and times of all_reduces, from the pass `first` on. They are those of the
    plan's own buckets, then those of the trial's other buckets.

    The time that an early rank measures includes its wait for the other ranks. So the time of a
    bucket in a pass is the minimum over the ranks. The result is the median over the passes.
    """
    sizes: list[float] = []
    seconds: list[float] = []
    for which, buckets in enumerate((own, trial.other)):
        passes = [
            np.min([rank.bucket_ns[number] for rank in times], axis=0)
            for number in range(first, len(trial.order) - 1)
            if trial.order[number] == which
        ]
        if not passes:
            continue
        by_bucket = np.array(passes)
        for place, index in enumerate(sampled(len(buckets))):
            known = by_bucket[:, place][by_bucket[:, place] != UNKNOWN]
            if len(known) and buckets[index].requests[0].fuses:
                sizes.append(float(buckets[index].nbytes))
                seconds.append(float(np.median(known)) / 1e9)
    return sizes, seconds

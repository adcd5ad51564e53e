"""Formulas for the time in which one link carries gradients that become ready one after another.

Gradient j is ready at `ready_s[j]`. The link carries one bucket of consecutive gradients at a time.
A bucket takes `latency_s` + bytes x `s_per_byte`. It starts when its last gradient is ready and the
link is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """The time of one collective: a latency and a time per byte."""

    latency_s: float
    s_per_byte: float

    def time_s(self, nbytes: float) -> float:
        """Returns the time of a collective of `nbytes`."""
        return self.latency_s + self.s_per_byte * nbytes


def finish_s(
    ready_s: Sequence[float], nbytes: Sequence[float], ends: Sequence[int], cost: LinkCost
) -> float:
    """Returns the time at which the last bucket has ended.

    `ends` has, for each bucket, the index after its last gradient. The last entry is the number of
    gradients.

    >>> cost = LinkCost(latency_s=2.0, s_per_byte=1.0)
    >>> finish_s([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [1, 2, 3], cost)
    10.0
    >>> finish_s([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [3], cost)
    8.0
    """
    begin, at_s = 0, 0.0
    for end in ends:
        at_s = max(at_s, ready_s[end - 1]) + cost.time_s(sum(nbytes[begin:end]))
        begin = end
    return at_s


def best_ends(
    ready_s: Sequence[float],
    nbytes: Sequence[float],
    cost: LinkCost,
    *,
    firsts: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Returns the `ends` of the buckets with the earliest `finish_s`.

    `firsts` has, for each gradient, the first gradient that may be in the same bucket. The entries
    must not decrease. None allows all gradients.

    The result is exact. It is found by dynamic programming over the end of the last bucket, in
    O(n²) for n gradients. MG-WFBP solves the same problem greedily (Shi, Chu, Li, "MG-WFBP:
    efficient data communication for distributed synchronous SGD algorithms", INFOCOM 2019).

    >>> best_ends([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], LinkCost(latency_s=0.1, s_per_byte=0.1))
    (1, 2, 3)
    >>> best_ends([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], LinkCost(latency_s=9.0, s_per_byte=0.1),
    ...     firsts=[0, 0, 2])
    (2, 3)
    """
    count = len(ready_s)
    before = np.concatenate([[0.0], np.cumsum(np.asarray(nbytes, float))])
    # `finished[j]` is the earliest time at which the first j gradients can have ended. In the
    # solution with this time, `begins[j]` is the first gradient of the last bucket.
    finished = np.zeros(count + 1)
    begins = np.zeros(count + 1, int)
    for end in range(1, count + 1):
        first = 0 if firsts is None else firsts[end - 1]
        starts_s = np.maximum(finished[first:end], ready_s[end - 1])
        ends_s = starts_s + cost.latency_s + cost.s_per_byte * (before[end] - before[first:end])
        # Among solutions of equal time, chooses the one with the shortest last bucket.
        begins[end] = end - 1 - int(np.argmin(ends_s[::-1]))
        finished[end] = ends_s[begins[end] - first]
    ends = [count]
    while begins[ends[-1]] > 0:
        ends.append(int(begins[ends[-1]]))
    return tuple(reversed(ends)) if count else ()

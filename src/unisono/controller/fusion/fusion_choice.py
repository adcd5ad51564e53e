"""The choice of buckets: finds the buckets that finish first, by a fitted cost (`cost_fit`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from unisono.controller.fusion.buckets import Bucket, kind_of
from unisono.controller.fusion.fusion_times import LinkCost, best_ends, finish_s

MOST_BUCKET_BYTES = 64 << 20
"""Maximum bytes of a bucket of several tensors, which needs a buffer."""

_PROBE_PARTS = 6

Floats = NDArray[np.float64]


def predicted_s(buckets: Sequence[Bucket], ready_s: Mapping[str, float], cost: LinkCost) -> float:
    """Returns the time from a step's first tensor to the end of its last bucket.

    `ready_s` has the time at which each tensor is ready, by name.
    """
    requests = [request for bucket in buckets for request in bucket.requests]
    ends = np.cumsum([len(bucket.requests) for bucket in buckets]).tolist()
    in_order = np.maximum.accumulate([ready_s[each.name] for each in requests])
    return finish_s(in_order.tolist(), [float(each.nbytes) for each in requests], ends, cost)


def best_buckets(
    buckets: Sequence[Bucket],
    ready_s: Mapping[str, float],
    cost: LinkCost,
    most_bytes: int = MOST_BUCKET_BYTES,
) -> tuple[Bucket, ...]:
    """Returns the buckets of the same tensors that finish first according to `predicted_s`.

    Tensors are ordered by phase, then by priority, then by the time at which they are ready. The
    result is the best division of this order into buckets (`best_ends`). All tensors of a bucket
    are of one kind (`kind_of`). A bucket of several tensors has at most `most_bytes`. The tensors
    of a group stay together.
    """
    units = sorted(
        units_of(buckets),
        key=lambda unit: (unit.phase, -unit.priority, max(ready_s[name] for name in unit.names)),
    )
    last_s = [max(ready_s[name] for name in unit.names) for unit in units]
    ends = best_ends(
        np.maximum.accumulate(last_s).tolist(),
        [float(unit.nbytes) for unit in units],
        cost,
        firsts=_firsts(units, most_bytes),
    )
    return _cut(units, ends)


def probe_buckets(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Returns buckets of several sizes with the same tensors, for a trial.

    Each bucket has about twice the bytes of the previous bucket. If the given buckets already have
    such sizes, the result has one bucket for each kind. The times of the given and the returned
    buckets together show the latency and the time per byte.
    """
    units = units_of(buckets)
    ends = _runs(units)
    runs = zip([0, *ends[:-1]], ends, strict=True)
    doubling = _cut(units, [cut for run in runs for cut in _doubling(units, *run)])
    alike = [each.names for each in doubling] == [each.names for each in buckets]
    return _cut(units, ends) if alike else doubling


def _runs(units: Sequence[Unit]) -> list[int]:
    """Returns the end index of each run of consecutive units of one kind."""
    kinds = [unit.kind for unit in units]
    return [j for j in range(1, len(units)) if kinds[j] != kinds[j - 1]] + [len(units)]


def _doubling(units: Sequence[Unit], begin: int, end: int) -> list[int]:
    before = np.cumsum([unit.nbytes for unit in units[begin:end]])
    cuts = [begin]
    for k in range(1, _PROBE_PARTS):
        limit = before[-1] * (2**k - 1) / (2**_PROBE_PARTS - 1)
        cut = begin + int(np.searchsorted(before, limit, side="right"))
        cuts.append(max(cuts[-1], cut if cut > cuts[-1] else cut + 1))
    return sorted({cut for cut in cuts if begin < cut < end} | {end})


class Unit(Bucket):
    """Tensors that must stay in one bucket: a single tensor, or the tensors of a group."""

    __slots__ = ()

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that must be equal for units that share a bucket (`kind_of`)."""
        return kind_of(self.requests[0])

    @property
    def phase(self) -> int:
        """The phase, which is equal for all tensors of the unit."""
        return self.requests[0].phase

    @property
    def priority(self) -> int:
        """The highest priority of the tensors."""
        return max(request.priority for request in self.requests)


def units_of(buckets: Sequence[Bucket]) -> list[Unit]:
    """Returns the units of these buckets, in order."""
    units: list[Unit] = []
    for bucket in buckets:
        if bucket.requests[0].group:
            units.append(Unit(bucket.requests))
        else:
            units += [Unit((request,)) for request in bucket.requests]
    return units


def _firsts(units: Sequence[Unit], most_bytes: int) -> list[int]:
    """Returns, for each unit, the index of the first unit that may be in the same bucket."""
    before = np.concatenate([[0], np.cumsum([unit.nbytes for unit in units])])
    kinds = [unit.kind for unit in units]
    firsts: list[int] = []
    first = 0
    for j in range(len(units)):
        if j > 0 and kinds[j] != kinds[j - 1]:
            first = j
        small = int(np.searchsorted(before, before[j + 1] - most_bytes, side="left"))
        firsts.append(min(j, max(first, small)))
    return firsts


def _cut(units: Sequence[Unit], ends: Sequence[int]) -> tuple[Bucket, ...]:
    begins = [0, *ends[:-1]]
    return tuple(
        Bucket(tuple(request for unit in units[begin:end] for request in unit.requests))
        for begin, end in zip(begins, ends, strict=True)
    )

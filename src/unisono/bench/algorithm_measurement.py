"""Measures several algorithms of one operation, which alternate in one group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

import numpy as np

from unisono import algorithms
from unisono.bench.cases import Case
from unisono.bench.contestant_ranks import CaseError, ContestantRanks
from unisono.communicator import estimate_call_s
from unisono.errors import UnsupportedError
from unisono.types import Op

_CALIBRATION_S = 1e-3
_MIN_ROUND_S = 1e-3
_MOST_ITERATIONS = 20_000
_VERIFIED_BYTES = 1 << 20
"""Maximum size of messages whose results are verified. Verification of larger messages takes longer
than all measurements; `unisono check` verifies them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementLength:
    """Length of a measurement: `rounds` rounds of all algorithms, which take about `budget_s`
    seconds in total. An algorithm is dropped if its first trial takes more than `drop` times as
    long as the fastest first trial."""

    rounds: int = 5
    budget_s: float = 0.5
    drop: float = 1.5

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.budget_s > 0 or not self.drop >= 1:
            raise ValueError("rounds and budget_s must be positive, and drop at least 1")


_FIELDS = ("round", "src", "src_chunk", "dst", "dst_chunk", "count", "reduce", "channel")


class WrongResultError(CaseError):
    """An algorithm returned wrong elements."""


def distinct(op: Op, names: Sequence[str], ranks: int) -> list[str]:
    """Returns the algorithms that support `ranks` ranks. Of algorithms with equal transfers,
    returns only the first.

    On two ranks, almost all algorithms have equal transfers.

    >>> distinct(Op.ALL_GATHER, ["direct", "ring", "pairwise"], ranks=2)
    ['direct']
    """
    found: dict[object, str] = {}
    for name in names:
        try:
            schedule = algorithms.build(op, name, ranks=ranks)
        except UnsupportedError:
            continue
        moves = np.stack([getattr(schedule.columns, field) for field in _FIELDS])
        key = (schedule.collective.parts, moves[:, np.lexsort(moves)].tobytes())
        found.setdefault(key, name)
    return list(found.values())


def measure_alternating(
    world: ContestantRanks,
    case: Case,
    names: Sequence[str],
    length: MeasurementLength,
    keep: Sequence[str] = (),
    observe: Callable[[str], None] = lambda name: None,
) -> dict[str, tuple[float, ...]]:
    """Returns the seconds per call in each round, for each algorithm that was not dropped.

    Algorithms in `keep` are never dropped. An algorithm that does not support the case is skipped.
    Raises `WrongResultError` for wrong elements, and `ContestantError` if a rank fails.
    """
    world.bind(case)
    first_s: dict[str, float] = {}
    for name in names:
        observe(name)
        try:
            world.choose(name)
        except CaseError:
            continue
        if case.size_bytes <= _VERIFIED_BYTES and (wrong := world.verify()):
            raise WrongResultError(f"{case.op} by {name}: {wrong} wrong elements")
        first_s[name] = estimate_call_s(world.time_s, least_s=_CALIBRATION_S, most=_MOST_ITERATIONS)
    least_s = min(first_s.values(), default=0.0)
    running = [n for n in first_s if n in keep or first_s[n] <= least_s * length.drop]
    share_s = length.budget_s / (length.rounds * max(1, len(running)))
    times_s: dict[str, list[float]] = {name: [] for name in running}
    for round_ in range(length.rounds):
        first = round_ % max(1, len(running))
        for name in running[first:] + running[:first]:
            observe(name)
            world.choose(name)
            wanted = ceil(max(share_s, _MIN_ROUND_S) / first_s[name])
            times_s[name].append(world.time_s(min(_MOST_ITERATIONS, wanted)))
    return {name: tuple(times) for name, times in times_s.items()}


def medians(times_s: dict[str, tuple[float, ...]]) -> dict[str, float]:
    """Returns the median time of each algorithm."""
    return {name: median(times) for name, times in times_s.items()}

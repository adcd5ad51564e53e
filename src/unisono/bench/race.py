"""Algorithms of one operation against each other, in one group of ranks, taking turns."""

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
_LEAST_TURN_S = 1e-3
_MOST_ITERATIONS = 20_000
_VERIFIED_BYTES = 1 << 20
"""Results of larger messages are not verified again: filling and comparing takes longer than all
measurements, and `unisono check` does it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceLength:
    """How long a race takes: turns of everybody, about `budget_s` in all. Who takes more than
    `drop` times as long as the fastest when first tried gets no further turns."""

    turns: int = 5
    budget_s: float = 0.5
    drop: float = 1.5

    def __post_init__(self) -> None:
        if self.turns < 1 or not self.budget_s > 0 or not self.drop >= 1:
            raise ValueError("turns and budget_s are positive, drop is 1 or more")


_FIELDS = ("round", "src", "src_chunk", "dst", "dst_chunk", "count", "reduce", "channel")


class WrongResultError(CaseError):
    """An algorithm left wrong elements behind."""


def distinct(op: Op, names: Sequence[str], ranks: int) -> list[str]:
    """Those that can serve so many ranks, less those whose transfers another has before them.

    On two ranks almost all are the same.

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


def race(
    world: ContestantRanks,
    case: Case,
    names: Sequence[str],
    length: RaceLength,
    keep: Sequence[str] = (),
    observe: Callable[[str], None] = lambda name: None,
) -> dict[str, tuple[float, ...]]:
    """Seconds of a call, a turn each, of the algorithms that were not dropped, in one world.

    Those of `keep` are never dropped. An algorithm that cannot serve the case is left out. Raises
    `WrongResultError`, and `WorldError` when the world is lost.
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
    share_s = length.budget_s / (length.turns * max(1, len(running)))
    times_s: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(length.turns):
        first = turn % max(1, len(running))
        for name in running[first:] + running[:first]:
            observe(name)
            world.choose(name)
            wanted = ceil(max(share_s, _LEAST_TURN_S) / first_s[name])
            times_s[name].append(world.time_s(min(_MOST_ITERATIONS, wanted)))
    return {name: tuple(times) for name, times in times_s.items()}


def medians(times_s: dict[str, tuple[float, ...]]) -> dict[str, float]:
    """The median turn of each."""
    return {name: median(times) for name, times in times_s.items()}

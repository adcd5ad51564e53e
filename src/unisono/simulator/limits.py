"""Limits of a comparison of algorithms: total time, time per algorithm, and number of transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono import algorithms
from unisono.errors import UnsupportedError
from unisono.types import Op

_SMALL = 256
"""Number of ranks below which every schedule is built quickly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a comparison. `budget_s` is the time for all algorithms together; one algorithm
    gets the fraction `part` of this time."""

    budget_s: float = 60.0
    part: float = 1 / 12
    transfers: int = 1 << 22
    """Maximum number of transfers of a schedule. A simulation takes about 250 bytes per
    transfer."""

    @property
    def each_s(self) -> float:
        """Seconds that the simulation of one algorithm may take, without the construction of its
        schedule."""
        return self.budget_s * self.part


def fastest_first(op: Op | str, names: Sequence[str], ranks: int) -> dict[str, int]:
    """Returns the expected number of transfers of each algorithm, ordered by expected simulation
    time. A simulation is fast if the schedule has few transfers, and few transfers per round."""
    found = {name: expected_transfers(op, name, ranks) for name in names}

    def work(name: str) -> float:
        if not found[name]:
            return 0.0
        rounds = algorithms.cost(op, name, ranks=ranks).rounds
        return found[name] ** 2 / max(1, rounds)

    return {name: found[name] for name in sorted(names, key=work)}


def expected_transfers(op: Op | str, name: str, ranks: int) -> int:
    """Estimates a schedule's number of transfers from the schedule for an eighth of the ranks. The
    estimate assumes that the number of transfers grows with the square of the number of ranks.
    Returns 0 for few ranks, and if the estimate fails.

    >>> expected_transfers("all_reduce", "ring", 1024) // 1000, 2 * 1024 * 1023 // 1000
    (2080, 2095)
    """
    if ranks < _SMALL:
        return 0
    fewer = ranks // 16 * 2
    try:
        algorithms.cost(op, name, ranks=ranks)
        small = algorithms.build(op, name, ranks=fewer)
    except UnsupportedError:
        return 0
    return round(len(small.transfers) * (ranks / fewer) ** 2)

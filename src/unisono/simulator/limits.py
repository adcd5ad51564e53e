"""Limits of a comparison of all algorithms: total time, time for each, and number of transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono import algorithms
from unisono.errors import UnsupportedError
from unisono.types import Op

_SMALL = 256
"""Below this number of ranks any schedule is built quickly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`budget_s` is the time for all algorithms together; a single algorithm gets the fraction
    `part`."""

    budget_s: float = 60.0
    part: float = 1 / 12
    transfers: int = 1 << 22
    """Maximum size of a schedule. Building and simulating takes about 250 bytes per transfer."""

    @property
    def each_s(self) -> float:
        """Time limit for the simulation of a single algorithm; building the schedule does not
        count."""
        return self.budget_s * self.part


def fastest_first(op: Op | str, names: Sequence[str], ranks: int) -> dict[str, int]:
    """Returns the expected transfers of each algorithm, ordered by expected simulation time. A
    simulation is fast if it has few transfers and runs few of them at once."""
    found = {name: expected_transfers(op, name, ranks) for name in names}

    def work(name: str) -> float:
        if not found[name]:
            return 0.0
        rounds = algorithms.cost(op, name, ranks=ranks).rounds
        return found[name] ** 2 / max(1, rounds)

    return {name: found[name] for name in sorted(names, key=work)}


def expected_transfers(op: Op | str, name: str, ranks: int) -> int:
    """Estimates a schedule's number of transfers without building it: 64 times the number for an
    eighth of the ranks. Returns 0 for few ranks, and if the number cannot be estimated.

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

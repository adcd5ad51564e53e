"""What a comparison of all algorithms waits for: time in all and for each, and transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono import algorithms
from unisono.errors import UnsupportedError
from unisono.types import Op

_SMALL = 256
"""Any algorithm for fewer ranks is built in a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`budget_s` is for all algorithms together, `part` of it for a single one."""

    budget_s: float = 60.0
    part: float = 1 / 12
    transfers: int = 1 << 22
    """Of a schedule: it takes about 250 bytes for each while it is built and simulated."""

    @property
    def each_s(self) -> float:
        """For a single algorithm, from when it has been built."""
        return self.budget_s * self.part


def quick_first(op: Op | str, names: Sequence[str], ranks: int) -> dict[str, int]:
    """The expected transfers of each, those first that are expected to be simulated soonest: with
    few transfers, of which few are under way at once."""
    found = {name: expected_transfers(op, name, ranks) for name in names}

    def work(name: str) -> float:
        if not found[name]:
            return 0.0
        rounds = algorithms.cost(op, name, ranks=ranks).rounds
        return found[name] ** 2 / max(1, rounds)

    return {name: found[name] for name in sorted(names, key=work)}


def expected_transfers(op: Op | str, name: str, ranks: int) -> int:
    """About how many transfers a schedule has, without building it: those for an eighth of the
    ranks, times 64. 0 for few ranks, and for what cannot be told this way.

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

"""Searches for the fastest algorithm, channel count and rank order of an operation on a network."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from time import monotonic

import numpy as np

from unisono.algorithms import cost
from unisono.errors import UnsupportedError
from unisono.simulator.compare import ComparedAlgorithm, entry, every
from unisono.simulator.conditions import Conditions
from unisono.simulator.simulation import Progress
from unisono.topology import Lattice, Topology
from unisono.types import Op

AS_NUMBERED = "as numbered"
_PLACED = 3
"""Number of fastest algorithms for which other rank orders are tried."""
_STRIDES = 6
_SWAPS = 24
_GAIN = 1e-9
"""Smallest relative improvement that counts; a smaller improvement can be a rounding error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """One simulated combination. `placement[r]` is the network's rank for rank r of the operation.
    With None, rank r is the network's rank r."""

    base: str
    """The name of the algorithm without its number of channels."""
    entry: ComparedAlgorithm
    order: str = AS_NUMBERED
    placement: tuple[int, ...] | None = None

    @property
    def time_s(self) -> float:
        """Seconds of the operation."""
        assert self.entry.result is not None, "a combination that does not fit has no SearchResult"
        return self.entry.result.time_s


@dataclass(slots=True)
class Search:
    """Results of a search: the best combination of each algorithm, the fastest first. `simulated`
    is the number of simulations. `pruned` is the number of combinations that were not simulated,
    because sending their bytes alone takes longer than the best time so far. `late` is the number
    of combinations that the time budget excluded."""

    found: list[SearchResult] = field(default_factory=list)
    simulated: int = 0
    pruned: int = 0
    late: int = 0


def search(
    op: Op | str,
    topology: Topology,
    nbytes: float,
    *,
    names: Sequence[str] | None = None,
    channels: Sequence[int] = (1, 2, 4),
    levels: tuple[int, ...] | None = None,
    conditions: Conditions | None = None,
    budget_s: float = 60.0,
    progress: Callable[[str, Progress], None] | None = None,
) -> Search:
    """Searches for the fastest combination of algorithm, channel count and rank order by
    simulation. Tries algorithms with channel counts, then rank orders of the three fastest
    combinations, then exchanges of two ranks in the best order.

    The cost model determines the order of trials and excludes algorithms that cannot win. An
    algorithm cannot win if the bytes of its busiest rank need more than the best time so far. No
    algorithm is excluded if a link model is used or if switches reduce and copy. After `budget_s`
    seconds the search ends and aborts the current simulation, unless it has no result yet. Raises
    `ValueError` if no algorithm fits.

    >>> from unisono import topology
    >>> done = search("all_reduce", topology.grid([4, 4]), 64e6, names=["ring"], channels=[1])
    >>> best = done.found[0]
    >>> best.entry.algorithm, best.order, best.placement[:8]
    ('ring', 'snake', (0, 1, 2, 3, 7, 6, 5, 4))
    """
    return _Run(op, topology, nbytes, levels, conditions, budget_s, progress).run(
        every(op, topology) if names is None else names, channels
    )


class _Run:
    """State of one search."""

    def __init__(
        self,
        op: Op | str,
        topology: Topology,
        nbytes: float,
        levels: tuple[int, ...] | None,
        conditions: Conditions | None,
        budget_s: float,
        progress: Callable[[str, Progress], None] | None,
    ) -> None:
        self.op, self.topology, self.nbytes, self.levels = op, topology, nbytes, levels
        self.conditions = conditions or Conditions()
        self.deadline_s = monotonic() + budget_s
        self.progress = progress
        self.state = Search()
        self.best: dict[str, SearchResult] = {}
        self.reasons: list[str] = []
        self.rate_Bps, self.latency_s = _rate_and_latency(topology)

    def run(self, names: Sequence[str], channels: Sequence[int]) -> Search:
        for base, name, least_s in self._candidates(names, channels):
            if self._cannot_win(least_s):
                self.state.pruned += 1
            else:
                self._try(base, name)
        if not self.best:
            raise ValueError(
                "; ".join(self.reasons) or ("nothing to search: names or channels are empty")
            )
        for found in self._sorted()[:_PLACED]:
            for order, placement in _orders(self.topology):
                self._try(found.base, found.entry.algorithm, order, placement)
        self._exchange(self._sorted()[0])
        self.state.found = self._sorted()
        return self.state

    def _candidates(
        self, names: Sequence[str], channels: Sequence[int]
    ) -> Iterator[tuple[str, str, float]]:
        """Yields (algorithm, name with channel count, least seconds), ordered by predicted time.
        The least seconds are a lower bound: the time in which the busiest rank can send its bytes,
        without latencies."""
        ranks = self.topology.num_ranks
        ranked: list[tuple[float, int, str, str, float]] = []
        for base in names:
            for count in channels:
                name = base if count == 1 else _in_channels(base, count)
                try:
                    found = cost(self.op, name, ranks=ranks, levels=self.levels)
                except UnsupportedError as error:
                    self.reasons.append(f"{name}: {error}")
                    continue
                least_s = float(found.bytes_sent) * self.nbytes / self.rate_Bps
                ranked.append(
                    (least_s + found.rounds * self.latency_s, len(ranked), base, name, least_s)
                )
        for _, _, base, name, least_s in sorted(ranked):
            yield base, name, least_s

    def _cannot_win(self, least_s: float) -> bool:
        if self.conditions.in_network or self.conditions.messages is not None:
            return False
        return any(least_s > found.time_s for found in self.best.values())

    def _try(
        self,
        base: str,
        name: str,
        order: str = AS_NUMBERED,
        placement: tuple[int, ...] | None = None,
    ) -> bool:
        """Simulates a combination. Returns True if it is the best combination of algorithm `base`
        so far."""
        found = self._simulate(base, name, order, placement)
        if found is None:
            return False
        before = self.best.get(base)
        better = before is None or found.time_s < before.time_s * (1 - _GAIN)
        if better:
            self.best[base] = found
        return better

    def _simulate(
        self, base: str, name: str, order: str, placement: tuple[int, ...] | None
    ) -> SearchResult | None:
        if self.best and monotonic() > self.deadline_s:
            self.state.late += 1
            return None
        left_s = max(0.0, self.deadline_s - monotonic()) if self.best else None
        made = entry(
            self.op, name, self.topology, self.nbytes,
            self.levels, placement, self.conditions, self.progress, left_s,
        )  # fmt: skip
        if made.too_large:
            self.state.late += 1
            return None
        if made.result is None:
            self.reasons.append(f"{name}: {made.reason}")
            return None
        self.state.simulated += 1
        return SearchResult(base=base, entry=made, order=order, placement=placement)

    def _exchange(self, best: SearchResult) -> None:
        """Repeatedly exchanges two ranks of the best order and keeps improvements."""
        rng, ranks = random.Random(1), self.topology.num_ranks
        now = best.placement or tuple(range(ranks))
        for _ in range(_SWAPS if ranks > 2 else 0):
            one, other = rng.sample(range(ranks), 2)
            changed = list(now)
            changed[one], changed[other] = now[other], now[one]
            if self._try(best.base, best.entry.algorithm, "exchanged", tuple(changed)):
                now = tuple(changed)

    def _sorted(self) -> list[SearchResult]:
        """Returns the best combination of each algorithm, the fastest first."""
        return sorted(self.best.values(), key=lambda found: found.time_s)


def _in_channels(name: str, count: int) -> str:
    return f"{name}{',' if ':' in name else ':'}channels={count}"


def _orders(topology: Topology) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and the rank order of each order to try, without duplicates and without the
    order 0, 1, 2, and so on."""
    ranks = topology.num_ranks
    plain = tuple(range(ranks))
    seen = {plain}
    for name, order in _all_orders(topology):
        if order not in seen:
            seen.add(order)
            yield name, order


def _all_orders(topology: Topology) -> Iterator[tuple[str, tuple[int, ...]]]:
    ranks = topology.num_ranks
    if isinstance(topology.routing, Lattice):
        yield "snake", _snake(topology.routing.sizes)
    strides = [step for step in range(2, ranks) if ranks % step == 0]
    strides = [step for step, _ in groupby(sorted({*strides[:_STRIDES], *strides[-_STRIDES:]}))]
    for step in strides:
        order = tuple(rank for first in range(step) for rank in range(first, ranks, step))
        yield f"stride {step}", order
    for seed in range(2):
        order_list = list(range(ranks))
        random.Random(seed).shuffle(order_list)
        yield f"shuffled {seed}", tuple(order_list)


def _snake(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns an order of a grid's ranks in which successive ranks are neighbours.

    >>> _snake((2, 3))
    (0, 1, 3, 2, 4, 5)
    """
    order, stride = [0], 1
    for size in sizes:
        order = [
            at * stride + rank
            for at in range(size)
            for rank in (order if at % 2 == 0 else reversed(order))
        ]
        stride *= size
    return tuple(order)


def _rate_and_latency(topology: Topology) -> tuple[float, float]:
    """Returns the largest total bandwidth of one rank's links, and the smallest latency of a
    link."""
    links = topology.links
    leaving = links.src < topology.num_ranks
    if not leaving.any():
        return float("inf"), 0.0
    rates = np.bincount(links.src[leaving], links.bandwidth_Bps[leaving])
    return float(rates.max()), float(links.latency_s[leaving].min())

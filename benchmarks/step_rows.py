"""Steps of several contestants in turn, and the table of their times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from types import MappingProxyType

import torch
from rich.table import Table
from timing import milliseconds
from torch import distributed as dist

PARALLELIZE = "parallelize"
AGREEMENT = 1e-4

Step = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds per step of the slowest rank, by contestant, one entry per round."""

    strategy: str
    model: str
    ranks: int
    times_s: dict[str, tuple[float, ...]]

    def ratio(self, other: str) -> float:
        """Returns the median over the rounds of our time over another contestant's time."""
        pairs = zip(self.times_s[PARALLELIZE], self.times_s[other], strict=True)
        return median(ours / theirs for ours, theirs in pairs)


def measured_row(
    strategy: str,
    model: str,
    found: dict[str, Step],
    rounds: int,
    steps: int,
    limits: Mapping[str, Step] = MappingProxyType({}),
) -> Row:
    """Compares the losses of the contestants' first steps, then takes their times in turn.

    `limits`: steps that leave work out, so their losses are others.
    """
    losses = {who: [step() for _ in range(4)] for who, step in found.items()}
    expected = losses[PARALLELIZE]
    for who, others in losses.items():
        wrong = max(abs(a / b - 1) for a, b in zip(others, expected, strict=True))
        if wrong > AGREEMENT:
            raise AssertionError(f"{strategy}, {model}: {who} has other losses: {losses}")
    for step in limits.values():
        step()
    found = {**found, **limits}
    times: dict[str, list[float]] = {who: [] for who in found}
    for round_ in range(rounds):
        for who in found if round_ % 2 else reversed(found):
            times[who].append(_time_s(found[who], steps))
    return Row(
        strategy=strategy,
        model=model,
        ranks=dist.get_world_size(),
        times_s={who: tuple(each) for who, each in times.items()},
    )


def _time_s(step: Step, steps: int) -> float:
    dist.barrier()
    begun_s = perf_counter()
    for _ in range(steps):
        step()
    taken = torch.tensor((perf_counter() - begun_s) / steps)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def render(rows: Sequence[Row]) -> Table:
    """Returns a table with medians and quartiles over the rounds, and our time over others'."""
    table = Table(title="ms a step: median (quartiles); in brackets our time over theirs")
    every = list(dict.fromkeys(who for row in rows for who in row.times_s))
    for name in ("model", "strategy"):
        table.add_column(name)
    for name in every:
        table.add_column(name, justify="right")
    for row in rows:
        cells = []
        for who in every:
            text = milliseconds(row.times_s[who]) if who in row.times_s else ""
            is_peer = bool(text) and who != PARALLELIZE
            cells.append(f"{text} [{row.ratio(who):.2f}]" if is_peer else text)
        table.add_row(row.model, row.strategy, *cells)
    return table

"""What the small benchmarks share: calls timed in turns, on several rank counts; the JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import unisono
from unisono.bench.machine_facts import describe_machine
from unisono.bench.probe import probe_core_latency_s
from unisono.communicator import Communicator
from unisono.communicator.explain import time_s

MOST_CALLS = 1000  # of a turn


def calls_within(turn_s: float, call_s: float) -> int:
    """How often a call fits into a turn: once at least."""
    return min(MOST_CALLS, max(1, int(turn_s / call_s)))


def in_turns(
    comm: Communicator, calls: Sequence[Callable[[], object]], often: Sequence[int], rounds: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds a call of two calls in every round; who goes first changes from round to round."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].append(time_s(comm, calls[which], often[which]))
    return tuple(times[0]), tuple(times[1])


def microseconds(times_s: tuple[float, ...]) -> str:
    """Median and quartiles."""
    first, _, third = quantiles(times_s, n=4, method="inclusive")
    return f"{median(times_s) * 1e6:.0f} ({first * 1e6:.0f}-{third * 1e6:.0f})"


def on_every(
    ranks: str, measure: Callable[..., list[Any]], arguments: tuple[Any, ...]
) -> tuple[list[Any], list[float]]:
    """The rows that rank 0 of each world measured, and the distance of the cores before each."""
    rows: list[Any] = []
    probes_s: list[float] = []
    for count in map(int, ranks.split(",")):
        probe_s = probe_core_latency_s()
        probes_s += [] if probe_s is None else [probe_s]
        rows += unisono.run(measure, ranks=count, args=arguments)[0]
    return rows, probes_s


def write(path: Path, rows: list[Any], probes_s: list[float]) -> None:
    """Everything measured, with the machine, as JSON."""
    document = {
        "machine": describe_machine(),
        "probes_s": probes_s,
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")

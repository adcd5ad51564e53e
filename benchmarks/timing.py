"""Functions that several benchmarks share: alternating measurements with several numbers of ranks,
and the JSON file of the results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import unisono
from unisono.bench.core_latency import probe_core_latency_s
from unisono.bench.machine_facts import describe_machine
from unisono.communicator import Communicator
from unisono.communicator.explain import time_s

MOST_CALLS = 1000  # maximum number of calls in one round


def calls_within(round_s: float, call_s: float) -> int:
    """Returns the number of calls that fit into one round, at least one."""
    return min(MOST_CALLS, max(1, int(round_s / call_s)))


def alternate(
    comm: Communicator, calls: Sequence[Callable[[], object]], often: Sequence[int], rounds: int
) -> tuple[tuple[float, ...], ...]:
    """Returns, for each of the calls, the seconds per call in each round. The calls take turns in
    running first.
    """
    times: list[list[float]] = [[] for _ in calls]
    for round_ in range(rounds):
        for step in range(1, len(calls) + 1):
            which = (round_ + step) % len(calls)
            times[which].append(time_s(comm, calls[which], often[which]))
    return tuple(map(tuple, times))


def microseconds(times_s: Sequence[float]) -> str:
    """Returns the median and the quartiles in microseconds, as text."""
    return _spread(times_s, 1e6, ".0f")


def milliseconds(times_s: Sequence[float]) -> str:
    """Returns the median and the quartiles in milliseconds, as text."""
    return _spread(times_s, 1e3, ".1f")


def _spread(times_s: Sequence[float], scale: float, form: str) -> str:
    first, _, third = quantiles(times_s, n=4, method="inclusive")
    low, middle, high = (format(scale * each, form) for each in (first, median(times_s), third))
    return f"{middle} ({low}-{high})"


def on_every(
    ranks: str, measure: Callable[..., list[Any]], arguments: tuple[Any, ...]
) -> tuple[list[Any], list[float]]:
    """Returns the rows that rank 0 measured with each number of ranks, and the core latency before
    each measurement.
    """
    rows: list[Any] = []
    probes_s: list[float] = []
    for count in map(int, ranks.split(",")):
        probe_s = probe_core_latency_s()
        probes_s += [] if probe_s is None else [probe_s]
        rows += unisono.run(measure, ranks=count, args=arguments)[0]
    return rows, probes_s


def write(path: Path, rows: list[Any], probes_s: list[float]) -> None:
    """Writes all measurements and a description of the machine as JSON."""
    document = {
        "machine": describe_machine(),
        "probes_s": probes_s,
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")

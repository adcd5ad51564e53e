"""Writes a simulation as a trace for Chrome's `about:tracing` and ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from unisono.errors import UnsupportedError
from unisono.simulator.result import Result, TaskKind
from unisono.topology import Ints

MOST_STEPS = 500_000
"""Viewers do not open files with more steps."""


def to_chrome_trace(result: Result) -> str:
    """Returns JSON in the Trace Event Format (Google, 2016), in microseconds. Each rank is a
    process, with rows for the messages that it sends and for its computation.

    Concurrent messages of a rank are in separate rows. Steps of the critical path have the category
    `critical`. Raises `UnsupportedError` for more than 500,000 steps.

    >>> import json, unisono
    >>> from unisono import algorithms, topology
    >>> ring = algorithms.build("all_reduce", "ring", ranks=4)
    >>> text = to_chrome_trace(unisono.simulate(ring, topology.ring(4), 4e6))
    >>> sum(event["ph"] == "X" for event in json.loads(text)["traceEvents"])
    24
    """
    kinds = (TaskKind.MESSAGE, TaskKind.REDUCTION, TaskKind.COMPUTE)
    rows = np.flatnonzero(np.isin(result.steps.kind, kinds))
    if len(rows) > MOST_STEPS:
        raise UnsupportedError(
            f"a trace has at most {MOST_STEPS} steps, got {len(rows)}; simulate fewer "
            "ranks or chunks"
        )
    events = [*_events(result, rows), *_names(result, rows)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(result: Result, rows: Ints) -> Iterator[dict[str, Any]]:
    steps = result.steps
    critical = set(result.critical_rows())
    order = rows[np.lexsort((rows, steps.begun_s[rows], steps.src[rows]))]
    free: dict[int, list[float]] = {}  # by rank: the time at which each of its rows becomes free
    for row in order.tolist():
        step = steps[row]
        busy = free.setdefault(step.src, [])
        line = next((i for i, until in enumerate(busy) if until <= step.begun_s), len(busy))
        busy[line : line + 1] = [step.arrived_s]
        yield {
            "name": _name(result, step.kind, step.dst, step.round),
            "cat": "critical" if row in critical else step.kind.name.lower(),
            "ph": "X",
            "pid": step.src,
            "tid": line,
            "ts": step.begun_s * 1e6,
            "dur": (step.arrived_s - step.begun_s) * 1e6,
            "args": {
                "job": result.jobs[step.job].name,
                "bytes": step.bytes,
                "round": step.round,
                "critical": row in critical,
            },
        }


def _name(result: Result, kind: TaskKind, dst: int, round_: int) -> str:
    if kind is TaskKind.MESSAGE:
        return f"to rank {dst}, round {round_}"
    return "reduce" if kind is TaskKind.REDUCTION else "compute"


def _names(result: Result, rows: Ints) -> Iterator[dict[str, Any]]:
    for rank in np.unique(result.steps.src[rows]).tolist():
        yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}

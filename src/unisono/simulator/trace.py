"""A simulation as a trace that Chrome's `about:tracing` and ui.perfetto.dev show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from unisono.errors import UnsupportedError
from unisono.simulator.result import Result, TaskKind
from unisono.topology import Ints

MOST_STEPS = 500_000
"""Above this a viewer does not open the file."""


def to_chrome_trace(result: Result) -> str:
    """Trace Event Format (Google, "Trace Event Format", 2016), as JSON text: a process for each
    rank, a row for what it sends, one for what it computes; microseconds.

    Messages that a rank sends at the same time are in rows of their own. Those of the critical path
    are called so. Raises `UnsupportedError` for more than 500,000 steps.

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
            f"a trace of {len(rows)} steps; at most {MOST_STEPS} can be looked at"
        )
    events = [*_events(result, rows), *_names(result, rows)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(result: Result, rows: Ints) -> Iterator[dict[str, Any]]:
    steps = result.steps
    critical = set(result.critical_rows())
    order = rows[np.lexsort((rows, steps.begun_s[rows], steps.src[rows]))]
    free: dict[int, list[float]] = {}  # by rank: when each of its rows is free again
    for row in order.tolist():
        step = steps[row]
        busy = free.setdefault(step.src, [])
        lane = next((i for i, until in enumerate(busy) if until <= step.begun_s), len(busy))
        busy[lane : lane + 1] = [step.arrived_s]
        yield {
            "name": _name(result, step.kind, step.dst, step.round),
            "cat": "critical" if row in critical else step.kind.name.lower(),
            "ph": "X",
            "pid": step.src,
            "tid": lane,
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

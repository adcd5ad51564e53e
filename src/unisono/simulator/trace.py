"""Writes a simulation as a trace for Chrome's `about:tracing` and ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from unisono.chrome_trace import TraceEvent, lanes, process_name, slice_event, trace_text
from unisono.errors import UnsupportedError
from unisono.simulator.result import Result, StepTime, TaskKind
from unisono.topology import Ints

MOST_STEPS = 500_000
"""Maximum number of steps of a trace; viewers do not open larger files."""


def to_chrome_trace(result: Result) -> str:
    """Returns a result as JSON in the Trace Event Format (Google, 2016), in microseconds. Each rank
    is a process, with rows for the messages that it sends and for its computation.

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
    return trace_text(_events(result, rows))


def _events(result: Result, rows: Ints) -> Iterator[TraceEvent]:
    steps = result.steps
    critical = set(result.critical_rows())
    order = rows[np.lexsort((rows, steps.begun_s[rows], steps.src[rows]))]
    for rank in np.unique(steps.src[order]).tolist():
        yield from process_name(rank, f"rank {rank}")
        mine = order[steps.src[order] == rank].tolist()
        times = [(steps[row].begun_s, steps[row].arrived_s) for row in mine]
        for row, (begun_s, ended_s), line in zip(mine, times, lanes(times), strict=True):
            step = steps[row]
            yield slice_event(
                _name(step, result.jobs[step.job].name),
                begun_s,
                ended_s,
                pid=rank,
                tid=line,
                cat="critical" if row in critical else step.kind.name.lower(),
                args={
                    "job": result.jobs[step.job].name,
                    "bytes": step.bytes,
                    "round": step.round,
                    "critical": row in critical,
                },
            )


def _name(step: StepTime, job: str) -> str:
    if step.kind is TaskKind.MESSAGE:
        return f"to rank {step.dst}, round {step.round}" if step.round >= 0 else job
    return "reduce" if step.kind is TaskKind.REDUCTION else job or "compute"

"""One call: jobs on a network, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.native import Simulation
from unisono.schedule import Schedule
from unisono.simulator.conditions import Conditions
from unisono.simulator.job import Compute, Job
from unisono.simulator.paths import NetworkPaths, PathBook
from unisono.simulator.result import JobTimes, Result, Steps, TaskKind, Usage
from unisono.simulator.tasks import TaskBook, Tasks
from unisono.topology import Floats, Topology

_EVENTS_AT_FIRST = 1000
_TURN_S = 0.1
"""About how often `progress` is called. An event takes from a microsecond to milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a simulation is: steps that are done, of how many, and its own time."""

    done: int
    total: int
    now_s: float


def simulate(
    what: Schedule | Sequence[Job | Compute],
    topology: Topology,
    nbytes: float | None = None,
    *,
    conditions: Conditions | None = None,
    bins: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> Result:
    """How a network serves a schedule, or several jobs at once.

    Messages are flows: each link on the way is shared max-min fairly by those that are on it, a
    message leaves when the values that it carries are there, and arrives its links' latency after
    its last byte has left. By default links are the only cost; see `Conditions`.

    `nbytes` is N, the bytes of the whole vector of a rank, or of all its pieces together; jobs have
    their own. Rank r of the schedule is rank r of the topology; a `Job` can place them elsewhere.
    `bins`: intervals of time for which the result tells what each link carried (from half as many
    on). `progress` is called now and then; if it raises, the simulation ends.

    Raises `UnsupportedError` if there are too few ranks, or no way between two of them;
    `ValueError` for what makes no sense; `TypeError` for the name of a schedule or a network.

    >>> import unisono
    >>> from unisono import algorithms, topology
    >>> ring = algorithms.build("all_reduce", "ring", ranks=8)
    >>> result = unisono.simulate(ring, topology.ring(8), 64e6)
    >>> f"{result.time_s * 1e3:.2f} ms"
    '2.25 ms'
    """
    if not isinstance(topology, Topology):
        raise TypeError(f"simulate: no topology: {topology!r}; topology.parse(text) makes one")
    jobs = _jobs(what, nbytes)
    network = NetworkPaths.of(topology, conditions or Conditions())
    paths = PathBook(network)
    book = TaskBook(network, paths, jobs)
    for number in _in_order(jobs):
        book.add(number)
    capacity = network.capacity()
    streams = network.conditions.traffic
    book.traffic(streams, len(capacity))
    capacity = np.concatenate([capacity, [stream.rate_Bps for stream in streams]])
    return _run(network, paths, book.build(), capacity, jobs, bins, progress)


def _jobs(what: Schedule | Sequence[Job | Compute], nbytes: float | None) -> list[Job | Compute]:
    if isinstance(what, Schedule):
        if nbytes is None:
            raise ValueError("simulate: a schedule needs nbytes, the bytes of the operation")
        return [Job(schedule=what, nbytes=nbytes)]
    if not all(isinstance(job, Job | Compute) for job in what):
        raise TypeError(f"simulate: no schedule, and no jobs: {what!r}; algorithms.build makes one")
    if nbytes is not None:
        raise ValueError("simulate: jobs have their own nbytes")
    if not what:
        raise ValueError("simulate: no jobs")
    return list(what)


def _in_order(jobs: Sequence[Job | Compute]) -> list[int]:
    """The jobs such that each comes after those that it names."""
    numbers: dict[str, int] = {}
    for number, job in enumerate(jobs):
        if job.name and job.name in numbers:
            raise ValueError(f"simulate: two jobs are called {job.name!r}")
        numbers[job.name] = number
    left, found = list(range(len(jobs))), list[int]()
    there: set[str] = set()
    for job in jobs:
        for name in job.after:
            if name not in numbers or not name:
                raise ValueError(f"job {job.name!r} comes after {name!r}, and there is no such job")
    while left:
        able = [number for number in left if there.issuperset(jobs[number].after)]
        if not able:
            names = ", ".join(repr(jobs[number].name) for number in left)
            raise ValueError(f"simulate: the jobs {names} wait for each other")
        found += able
        there |= {jobs[number].name for number in able}
        left = [number for number in left if number not in able]
    return found


def _run(
    network: NetworkPaths,
    paths: PathBook,
    tasks: Tasks,
    capacity: Floats,
    jobs: Sequence[Job | Compute],
    bins: int,
    progress: Callable[[Progress], None] | None,
) -> Result:
    engine = _engine(paths, tasks, capacity, bins)
    _advance(engine, progress)
    if engine.to_come():
        raise ValueError(
            "simulate: messages of jobs wait for each other in their streams: a job that comes "
            "after another needs a later first_round"
        )
    begun_s, arrived_s, cause, carried, binned, width_s = engine.take()
    names = ("job", "kind", "round", "src", "dst", "channel", "bytes")
    columns = {name: getattr(tasks, name) for name in names}
    steps = Steps(begun_s=begun_s, arrived_s=arrived_s, cause=cause, **columns)
    usage = Usage(width_s=width_s, link_bytes=_by_link(network, binned)) if bins else None
    return Result(
        topology=network.original,
        time_s=float(arrived_s.max(initial=0.0)),
        jobs=_times(jobs, steps),
        steps=steps,
        link_bytes=_by_link(network, carried),
        capacity_Bps=_by_link(network, capacity),
        usage=usage,
    )


def _advance(engine: Simulation, progress: Callable[[Progress], None] | None) -> None:
    """To the end, some events at a time, as many as a turn takes."""
    total, events = engine.to_come(), _EVENTS_AT_FIRST
    begun_s = monotonic()
    while engine.advance(events):
        took_s = monotonic() - begun_s
        if took_s > _TURN_S:
            events = max(1, events // 2)
        elif took_s < _TURN_S / 4:
            events *= 2
        if progress is not None:
            progress(Progress(done=total - engine.to_come(), total=total, now_s=engine.now_s()))
        begun_s = monotonic()


def _engine(paths: PathBook, tasks: Tasks, capacity: Floats, bins: int) -> Simulation:
    found = paths.build()
    return Simulation(
        capacity=capacity,
        path_values=found.values,
        path_starts=found.starts,
        weights=found.weights,
        server=found.server,
        busy_s=found.busy_s,
        delay_s=found.delay_s,
        tail_s=found.tail_s,
        path=tasks.path,
        bytes=tasks.bytes,
        needs=tasks.needs,
        needs_starts=tasks.needs_starts,
        after=tasks.after,
        bins=bins,
    )


def _by_link(network: NetworkPaths, values: NDArray[Any]) -> NDArray[Any]:
    """Rows of resources as rows of the links of the network as it was built."""
    found = np.zeros((len(network.original.links), *values.shape[1:]), values.dtype)
    found[network.links] = values[: network.num_links]
    return found


def _times(jobs: Sequence[Job | Compute], steps: Steps) -> tuple[JobTimes, ...]:
    found = []
    real = steps.kind != TaskKind.JOIN
    for number, job in enumerate(jobs):
        rows = (steps.job == number) & real if len(jobs) > 1 else real
        rows &= steps.kind != TaskKind.TRAFFIC
        begun = float(steps.begun_s[rows].min(initial=np.inf)) if rows.any() else 0.0
        ended = float(steps.arrived_s[rows].max(initial=0.0))
        found.append(JobTimes(name=job.name, begun_s=begun, ended_s=ended))
    return tuple(found)

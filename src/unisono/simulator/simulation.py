"""The function that simulates jobs on a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.native import Simulation
from unisono.schedule import Schedule
from unisono.simulator.conditions import Conditions
from unisono.simulator.job import AnyJob, Compute, Job, Message
from unisono.simulator.paths import NetworkPaths, PathBuilder
from unisono.simulator.result import JobTimes, Result, Steps, TaskKind, Usage
from unisono.simulator.tasks import TaskBuilder, Tasks
from unisono.topology import Floats, Topology

_EVENTS_AT_FIRST = 1000
_PROGRESS_INTERVAL_S = 0.1
"""Approximate seconds between calls of `progress`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a simulation: finished steps, all steps, and simulated time."""

    done: int
    total: int
    now_s: float


def simulate(
    what: Schedule | Sequence[AnyJob],
    topology: Topology,
    nbytes: float | None = None,
    *,
    conditions: Conditions | None = None,
    bins: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Simulates a schedule, or several concurrent jobs, on a network.

    Messages are flows that share each link max-min fairly. A message leaves when its values are
    available. It arrives when its last byte has left and the latency of its links has passed. By
    default only links take time; see `Conditions`.

    `nbytes` is N, the size of a rank's whole vector, or of all its pieces together. It is given
    only with a schedule; a job has its own size. Rank r of the schedule is rank r of the topology;
    a `Job` can place its ranks differently. With `bins`, the result has the bytes of each link in
    `bins / 2` to `bins` intervals of time. `progress` is called about ten times a second. An
    exception that `progress` raises ends the simulation.

    Raises `UnsupportedError` if the network has too few ranks or two ranks are not connected.
    Raises `ValueError` for invalid values, and `TypeError` for the name of a schedule or topology.

    >>> import unisono
    >>> from unisono import algorithms, topology
    >>> ring = algorithms.build("all_reduce", "ring", ranks=8)
    >>> result = unisono.simulate(ring, topology.ring(8), 64e6)
    >>> f"{result.time_s * 1e3:.2f} ms"
    '2.25 ms'
    """
    if not isinstance(topology, Topology):
        raise TypeError(
            f"simulate: expected a topology, got {topology!r}; topology.parse(text) makes one"
        )
    jobs = _jobs(what, nbytes)
    network = NetworkPaths.of(topology, conditions or Conditions())
    paths = PathBuilder(network)
    tasks, capacity = _tasks(network, paths, jobs)
    return _run(network, paths, tasks, capacity, jobs, bins, progress)


def _tasks(
    network: NetworkPaths, paths: PathBuilder, jobs: Sequence[AnyJob]
) -> tuple[Tasks, Floats]:
    """Returns the tasks of all jobs and of other traffic, and the rate of each resource."""
    tasks = TaskBuilder(network, paths, jobs)
    for number in _in_order(jobs):
        tasks.add(number)
    capacity, streams = network.capacity(), network.conditions.traffic
    tasks.traffic(streams, len(capacity))
    rates = np.concatenate([capacity, [stream.rate_Bps for stream in streams]])
    return tasks.build(), rates


def _jobs(what: Schedule | Sequence[AnyJob], nbytes: float | None) -> list[AnyJob]:
    if isinstance(what, Schedule):
        if nbytes is None:
            raise ValueError("simulate: a schedule needs nbytes, the bytes of the operation")
        return [Job(schedule=what, nbytes=nbytes)]
    if not all(isinstance(job, Job | Compute | Message) for job in what):
        raise TypeError(
            f"simulate: expected a schedule or jobs, got {what!r}; algorithms.build makes a "
            "schedule"
        )
    if nbytes is not None:
        raise ValueError("simulate: expected no nbytes, because jobs have their own")
    if not what:
        raise ValueError("simulate: expected at least one job")
    return list(what)


def _in_order(jobs: Sequence[AnyJob]) -> list[int]:
    """Returns the numbers of the jobs, ordered so that each job comes after the jobs that its
    `after` names."""
    numbers: dict[str, int] = {}
    for number, job in enumerate(jobs):
        if job.name and job.name in numbers:
            raise ValueError(f"simulate: two jobs have the name {job.name!r}")
        numbers[job.name] = number
    for job in jobs:
        for name in job.after:
            if name not in numbers or not name:
                raise ValueError(f"job {job.name!r} comes after {name!r}, but no job has this name")
    sorter = TopologicalSorter(
        {number: {numbers[name] for name in job.after} for number, job in enumerate(jobs)}
    )
    try:
        sorter.prepare()
    except CycleError as error:
        names = ", ".join(repr(jobs[number].name) for number in error.args[1][1:])
        raise ValueError(f"simulate: the jobs {names} wait for each other") from None
    found: list[int] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        found += ready
        sorter.done(*ready)
    return found


def _run(
    network: NetworkPaths,
    paths: PathBuilder,
    tasks: Tasks,
    capacity: Floats,
    jobs: Sequence[AnyJob],
    bins: int,
    progress: Callable[[Progress], None] | None,
) -> Result:
    engine = _engine(paths, tasks, capacity, bins)
    _advance(engine, progress)
    if engine.to_come():
        raise ValueError(
            "simulate: messages of jobs wait for each other in their streams; a job that "
            "comes after another needs a later first_round"
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
    """Runs the engine to the end, in batches of events. A batch takes about one progress
    interval."""
    total, events = engine.to_come(), _EVENTS_AT_FIRST
    begun_s = monotonic()
    while engine.advance(events):
        took_s = monotonic() - begun_s
        if took_s > _PROGRESS_INTERVAL_S:
            events = max(1, events // 2)
        elif took_s < _PROGRESS_INTERVAL_S / 4:
            events *= 2
        if progress is not None:
            progress(Progress(done=total - engine.to_come(), total=total, now_s=engine.now_s()))
        begun_s = monotonic()


def _engine(paths: PathBuilder, tasks: Tasks, capacity: Floats, bins: int) -> Simulation:
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
    """Returns a value for each link of the intact network, from the values of all resources. Failed
    links get 0."""
    found = np.zeros((len(network.original.links), *values.shape[1:]), values.dtype)
    found[network.links] = values[: network.num_links]
    return found


def _times(jobs: Sequence[AnyJob], steps: Steps) -> tuple[JobTimes, ...]:
    rows = (steps.kind != TaskKind.JOIN) & (steps.kind != TaskKind.TRAFFIC)
    job = steps.job[rows]
    begun, ended = np.full(len(jobs), np.inf), np.zeros(len(jobs))
    np.minimum.at(begun, job, steps.begun_s[rows])
    np.maximum.at(ended, job, steps.arrived_s[rows])
    begun[np.isinf(begun)] = 0.0  # a job without steps
    return tuple(
        JobTimes(name=each.name, begun_s=float(first), ended_s=float(last))
        for each, first, last in zip(jobs, begun, ended, strict=True)
    )

"""Compares the algorithms of an operation on a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from time import monotonic

from unisono import algorithms
from unisono.errors import UnsupportedError
from unisono.schedule import Schedule
from unisono.simulator.conditions import Conditions
from unisono.simulator.job import Job
from unisono.simulator.limits import Limits, fastest_first
from unisono.simulator.result import Result, Steps
from unisono.simulator.simulation import Progress, simulate
from unisono.topology import Lattice, Topology
from unisono.types import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedAlgorithm:
    """An algorithm with its simulated result, or with the reason why it has no result. `too_large`
    means that the algorithm was skipped or aborted because of the limits. `messages` counts
    messages between different ranks."""

    algorithm: str
    schedule: Schedule | None = None
    result: Result | None = None
    messages: int = 0
    reason: str = ""
    too_large: bool = False

    @property
    def time_s(self) -> float:
        """Seconds of the operation; infinite without a result."""
        return float("inf") if self.result is None else self.result.time_s


class _DeadlineError(Exception):
    """Raised when a simulation exceeds its deadline."""


def compare(
    op: Op | str,
    topology: Topology,
    nbytes: float,
    *,
    names: Sequence[str] | None = None,
    levels: tuple[int, ...] | None = None,
    placement: Sequence[int] | None = None,
    conditions: Conditions | None = None,
    limits: Limits | None = None,
    progress: Callable[[str, Progress], None] | None = None,
) -> list[ComparedAlgorithm]:
    """Simulates algorithms on a network and returns them, the fastest first. Algorithms without a
    result are last.

    `names` are names of algorithms, as for `algorithms.build`. None means all algorithms, and on a
    torus also the `swing` variant that uses all ports. `levels` are group sizes, innermost first,
    for hierarchical algorithms; the default is the axes of a torus or grid. `placement` lists the
    network's rank of each rank of the operation; None means all ranks. `limits` bound the time and
    size of each simulation. With `limits`, only the fastest algorithm keeps its schedule and steps,
    because they can take gigabytes.

    >>> from unisono import topology
    >>> found = compare("all_reduce", topology.torus([4, 4]), 1e6, names=["ring", "bucket"])
    >>> [entry.algorithm for entry in found]
    ['bucket', 'ring']
    """
    place = None if placement is None else tuple(placement)
    chosen = every(op, topology) if names is None else list(names)

    def simulated(name: str, limit_s: float | None = None) -> ComparedAlgorithm:
        return entry(op, name, topology, nbytes, levels, place, conditions, progress, limit_s)

    if limits is None:
        found = [simulated(name) for name in chosen]
    else:
        ranks = topology.num_ranks if place is None else len(place)
        found = _within(limits, fastest_first(op, chosen, ranks), simulated)
    return sorted(found, key=lambda one: (one.time_s, chosen.index(one.algorithm)))


def _within(
    limits: Limits,
    transfers: Mapping[str, int],
    simulated: Callable[[str, float], ComparedAlgorithm],
) -> list[ComparedAlgorithm]:
    """Simulates each algorithm within the limits. `transfers` maps names of algorithms to expected
    numbers of transfers."""
    ends_s = monotonic() + limits.budget_s
    found: list[ComparedAlgorithm] = []
    for name, expected in transfers.items():
        if reason := _too_large(expected, limits, ends_s):
            found.append(ComparedAlgorithm(algorithm=name, reason=reason, too_large=True))
        else:
            found = _keep_only_fastest_steps([*found, simulated(name, limits.each_s)])
    return found


def _too_large(transfers: int, limits: Limits, ends_s: float) -> str:
    """Returns the reason for skipping an algorithm, or an empty string."""
    if monotonic() >= ends_s:
        return f"skipped: the budget of {limits.budget_s:g} s for all algorithms was spent"
    return (
        (f"skipped: about {transfers:,} transfers, more than {limits.transfers:,}")
        if transfers > limits.transfers
        else ""
    )


def _keep_only_fastest_steps(entries: list[ComparedAlgorithm]) -> list[ComparedAlgorithm]:
    fastest = min(entries, key=lambda one: one.time_s)
    return [one if one is fastest else _without_steps(one) for one in entries]


def _without_steps(one: ComparedAlgorithm) -> ComparedAlgorithm:
    """Returns a result without its schedule and steps."""
    if one.result is None or one.schedule is None:
        return one
    steps = one.result.steps
    none = Steps(**{f.name: getattr(steps, f.name)[:0].copy() for f in fields(Steps)})
    return replace(one, schedule=None, result=replace(one.result, steps=none))


def every(op: Op | str, topology: Topology) -> list[str]:
    """Returns the names of an operation's algorithms, with variants for this network."""
    return [*algorithms.names(op), *_for_ports(op, topology)]


def _for_ports(op: Op | str, topology: Topology) -> Iterator[str]:
    routing = topology.routing
    if Op(op) is Op.ALL_REDUCE and isinstance(routing, Lattice) and all(routing.wraps):
        yield f"swing:ports={2 * len(routing.sizes)}"


def build(
    op: Op | str,
    name: str,
    topology: Topology,
    levels: tuple[int, ...] | None = None,
    ranks: int | None = None,
) -> Schedule:
    """Builds an algorithm's schedule for all or some ranks of a network. The default of `levels` is
    the axes of a torus or grid."""
    routing = topology.routing
    whole = ranks is None or ranks == topology.num_ranks
    if levels is None and whole and isinstance(routing, Lattice) and len(routing.sizes) > 1:
        # Rank numbers vary fastest along the last axis of a lattice, but `levels` begin with the
        # innermost group.
        levels = tuple(reversed(routing.sizes))
    return algorithms.build(op, name, ranks=ranks or topology.num_ranks, levels=levels)


def entry(
    op: Op | str,
    name: str,
    topology: Topology,
    nbytes: float,
    levels: tuple[int, ...] | None = None,
    placement: tuple[int, ...] | None = None,
    conditions: Conditions | None = None,
    progress: Callable[[str, Progress], None] | None = None,
    limit_s: float | None = None,
) -> ComparedAlgorithm:
    """Simulates one algorithm; aborts the simulation `limit_s` seconds after the schedule was
    built."""
    if progress is not None:
        progress(name, Progress(done=0, total=1, now_s=0.0))
    try:
        count = topology.num_ranks if placement is None else len(placement)
        schedule = build(op, name, topology, levels, count)
    except UnsupportedError as error:
        return ComparedAlgorithm(algorithm=name, reason=str(error))
    ends_s = float("inf") if limit_s is None else monotonic() + limit_s

    def report(at: Progress) -> None:
        if progress is not None:
            progress(name, at)
        if monotonic() >= ends_s and at.done < at.total:
            raise _DeadlineError

    job = Job(schedule=schedule, nbytes=nbytes, ranks=placement)
    try:
        result = simulate([job], topology, conditions=conditions, progress=report)
    except _DeadlineError:
        return ComparedAlgorithm(
            algorithm=name, reason=f"aborted after {limit_s:.3g} s", too_large=True
        )
    messages = len(result.steps.messages())
    return ComparedAlgorithm(algorithm=name, schedule=schedule, result=result, messages=messages)

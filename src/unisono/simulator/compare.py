"""Algorithms of an operation side by side on a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from unisono import algorithms
from unisono.errors import UnsupportedError
from unisono.schedule import Schedule
from unisono.simulator.conditions import Conditions
from unisono.simulator.job import Job
from unisono.simulator.result import Result
from unisono.simulator.simulation import Progress, simulate
from unisono.topology import Topology
from unisono.topology.lattice import Lattice
from unisono.types import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An algorithm and what came of it: a result, or why it does not fit."""

    algorithm: str
    schedule: Schedule | None = None
    result: Result | None = None
    reason: str = ""


def compare(
    op: Op | str,
    topology: Topology,
    nbytes: float,
    *,
    names: Sequence[str] | None = None,
    levels: tuple[int, ...] | None = None,
    placement: Sequence[int] | None = None,
    conditions: Conditions | None = None,
    progress: Callable[[str, Progress], None] | None = None,
) -> list[Entry]:
    """Algorithms on all ranks of a network, the fastest first; then those that do not fit.

    `names` are written as for `algorithms.build`; None: all there are, on a torus also those for
    all its ports. `levels` are sizes of groups, innermost first, for algorithms that take them; by
    default the axes of a torus or grid. `placement`: which of the ranks take part, in their order.

    >>> from unisono import topology
    >>> found = compare("all_reduce", topology.torus([4, 4]), 1e6, names=["ring", "bucket"])
    >>> [entry.algorithm for entry in found]
    ['bucket', 'ring']
    """
    found = []
    place = None if placement is None else tuple(placement)
    for name in every(op, topology) if names is None else names:
        found.append(entry(op, name, topology, nbytes, levels, place, conditions, progress))
    return sorted(found, key=lambda e: e.result.time_s if e.result is not None else float("inf"))


def every(op: Op | str, topology: Topology) -> list[str]:
    """The algorithms of an operation that a network calls for."""
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
    """The schedule of an algorithm for all or some ranks of a network, with its axes as dims."""
    routing = topology.routing
    whole = ranks is None or ranks == topology.num_ranks
    if levels is None and whole and isinstance(routing, Lattice) and len(routing.sizes) > 1:
        # A lattice counts its last axis the fastest, a grid of ranks its first.
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
) -> Entry:
    """One algorithm."""
    if progress is not None:
        progress(name, Progress(done=0, total=1, now_s=0.0))
    try:
        count = topology.num_ranks if placement is None else len(placement)
        schedule = build(op, name, topology, levels, count)
    except UnsupportedError as error:
        return Entry(algorithm=name, reason=str(error))
    told = None if progress is None else lambda at: progress(name, at)
    job = Job(schedule=schedule, nbytes=nbytes, ranks=placement)
    result = simulate([job], topology, conditions=conditions, progress=told)
    return Entry(algorithm=name, schedule=schedule, result=result)

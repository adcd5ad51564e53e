"""Sweeps: simulations in which one parameter of a network or job takes several values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unisono.simulator.compare import ComparedAlgorithm, compare
from unisono.simulator.conditions import Conditions
from unisono.simulator.limits import Limits
from unisono.simulator.simulation import Progress
from unisono.topology import Topology, load, parse, variable, vary
from unisono.types import Op

_COUNTS = ("ranks", "hosts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Results for one value of the parameter: the network, the number of participating ranks, and
    the algorithms, the fastest first."""

    value: str
    topology: Topology
    ranks: int
    entries: tuple[ComparedAlgorithm, ...]

    @property
    def best(self) -> ComparedAlgorithm | None:
        """The fastest algorithm, or None if no algorithm has a result."""
        return next((entry for entry in self.entries if entry.result is not None), None)


def sweep(
    op: Op | str,
    spec: str,
    name: str,
    values: Sequence[str],
    nbytes: float,
    *,
    names: Sequence[str] | None = None,
    levels: tuple[int, ...] | None = None,
    conditions: Conditions | None = None,
    limits: Limits | None = None,
    progress: Callable[[str, Progress], None] | None = None,
) -> list[Point]:
    """Simulates algorithms on a network for several values of one parameter.

    The parameter `name` is an option of the spec; see `topology.vary`. If the spec has no option
    `ranks` or `hosts`, a value of `ranks` or `hosts` selects the first ranks or hosts of the
    network. Raises `ValueError` for a parameter that cannot be varied and for invalid values.
    `limits` apply to each value; see `compare`.

    >>> found = sweep("all_reduce", "star:16", "ranks", ["2", "4", "8"], 1e9, names=["ring"])
    >>> [(p.ranks, round(p.best.result.time_s * 1e3)) for p in found]
    [(2, 20), (4, 30), (8, 35)]
    """
    networks = [(value, *changed(spec, name, value)) for value in values]  # rejects invalid values
    found = []
    for value, topology, ranks in networks:
        entries = compare(
            op,
            topology,
            nbytes,
            names=names,
            levels=levels,
            placement=None if ranks == topology.num_ranks else range(ranks),
            conditions=conditions,
            limits=limits,
            progress=progress,
        )
        found.append(Point(value=value, topology=topology, ranks=ranks, entries=tuple(entries)))
    return found


def changed(spec: str, name: str, value: str) -> tuple[Topology, int]:
    """Returns a network with one parameter changed, and the number of participating ranks.

    >>> changed("fat_tree:4", "hosts", "6"), changed("dgx:8/star:32", "hosts", "2")[1]
    ((<Topology fat_tree:k=4: 16 ranks, 48 links>, 6), 16)
    """
    is_file = spec.endswith((".json", ".xml"))
    parts = [] if is_file else spec.split("/", 1)
    if name not in _COUNTS or any(name in variable(part) for part in parts):
        if is_file:
            raise ValueError(
                f"{spec}: only {' or '.join(_COUNTS)} of a file can be varied, not {name}"
            )
        topology = parse(vary(spec, name, value))
        return topology, topology.num_ranks
    topology = load(spec)
    per_host = parse(parts[0]).num_ranks if name == "hosts" and len(parts) == 2 else 1
    most = topology.num_ranks // per_host
    if not value.isdecimal() or not 1 <= int(value) <= most:
        raise ValueError(f"{name}={value}: {topology.name} has 1 to {most} {name}")
    return topology, int(value) * per_host


def scale_factor(compute_s: float, communicate_s: float) -> float:
    """Returns T_n / (n T_1), where T_n is the throughput of n ranks in samples per second. Each
    rank computes on its own samples for `compute_s`, then all ranks communicate. A single rank does
    not communicate.

    >>> scale_factor(30e-3, 10e-3)
    0.75
    """
    return compute_s / (compute_s + communicate_s)

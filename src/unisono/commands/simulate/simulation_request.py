"""The parsed command line of `unisono simulate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono import algorithms
from unisono.commands import outputs
from unisono.errors import UnsupportedError
from unisono.types import Op

if TYPE_CHECKING:
    from rich.table import Table

    from unisono.commands.simulate.options import SimulateOptions
    from unisono.simulator import ComparedAlgorithm, Conditions, Limits, LinkModel, Progress
    from unisono.topology import Topology

    Show = Callable[[str, Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """Requested additional output about one algorithm: the heat map, the trace, the critical
    path."""

    heat_path: Path | None = None
    trace_path: Path | None = None
    critical: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Results of the command, to print and to write to files."""

    table: Table
    document: dict[str, Any]
    lines: list[str]
    files: list[tuple[Path, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRequest:
    """A simulation to run. `names` are the algorithms; None means all."""

    op: str
    spec: str
    topology: Topology
    nbytes: int
    names: list[str] | None
    levels: tuple[int, ...] | None
    conditions: Conditions
    details: Details
    budget_s: float = 60.0

    @property
    def limits(self) -> Limits | None:
        """Limits of the time and of the number of transfers if all algorithms are simulated. None
        if the user named the algorithms, which are then simulated without limits."""
        from unisono.simulator import Limits

        return Limits(budget_s=self.budget_s) if self.names is None else None

    def compare(self, nbytes: float, show: Show) -> list[ComparedAlgorithm]:
        """Simulates the algorithms. Returns the results, the fastest first."""
        from unisono.simulator import compare

        return compare(
            self.op,
            self.topology,
            nbytes,
            names=self.names,
            levels=self.levels,
            conditions=self.conditions,
            limits=self.limits,
            progress=show,
        )

    @property
    def model_lines(self) -> list[str]:
        """Lines about the measurement of the link model, from the function `model_lines`."""
        return model_lines(self.conditions)

    def bound_s(self, topology: Topology) -> float:
        """Returns the lower bound in seconds on a network, with the rates of the link model if
        there is one."""
        from unisono.simulator import bound_s

        model = self.conditions.messages
        if model is None:
            return bound_s(self.op, topology, self.nbytes, in_network=self.conditions.in_network)
        return model.lightest(self.nbytes) * bound_s(self.op, model.network(topology), self.nbytes)


def model_lines(conditions: Conditions) -> list[str]:
    """Returns a line about the measurement from which the link model comes. Returns no line if no
    model is used."""
    model = conditions.messages
    if model is None:
        return []
    return [f"messages as measured: {model.op} on {model.ranks} ranks ({model.source})"]


def read_request(options: SimulateOptions) -> SimulationRequest:
    """Converts options to a request. Raises ValueError."""
    from unisono.bench import parse_size
    from unisono.topology import load

    topology = load(options.topology_spec)
    conditions = read_conditions(options, topology)
    task = SimulationRequest(
        op=options.op,
        spec=options.topology_spec,
        topology=topology,
        nbytes=parse_size(options.size),
        names=read_names(options.op, options.algorithm, options.names),
        levels=read_levels(options.levels),
        conditions=conditions,
        details=Details(
            heat_path=options.heat_path,
            trace_path=options.trace_path,
            critical=options.algorithm is not None,
        ),
        budget_s=options.budget,
    )
    check_levels(task)
    if options.in_network and not topology.nodes.reduces.any():
        raise ValueError(f"--in-network: {topology.name} has no switch that reduces")
    return task


def read_names(op: str, algorithm: str | None, names: str) -> list[str] | None:
    """Parses the algorithms of --compare; None means all. Raises ValueError for unknown names."""
    if algorithm is not None:
        return [algorithm]
    # Options of a name may contain commas (`swing:dims=4x4,ports=4`). A text that contains `;` or
    # `:` is therefore split at each `;`.
    cut = names.split(";" if ";" in names or ":" in names else ",")
    found = [name.strip() for name in cut if name.strip()]
    if not found:
        raise ValueError("--compare expects names of algorithms, or all")
    if found == ["all"]:
        return None
    elsewhere = {name for each in Op for name in algorithms.names(each)}
    for name in found:
        if name.partition(":")[0] not in elsewhere:
            # This raises an error for an unknown name. Algorithms of other operations are skipped
            # later, by the simulator.
            algorithms.find(op, name)
    return found


def read_levels(text: str | None) -> tuple[int, ...] | None:
    """Parses the sizes of groups of ranks, such as 4x8, innermost first. Raises ValueError."""
    if text is None:
        return None
    try:
        return tuple(int(size) for size in text.split("x"))
    except ValueError:
        raise ValueError(f"--levels {text}: expected sizes as in 4x8") from None


def check_levels(task: SimulationRequest) -> None:
    """Raises ValueError if levels are given but no algorithm uses them."""
    names = algorithms.names(task.op) if task.names is None else task.names
    if task.levels is None or any(_takes_levels(task.op, name) for name in names):
        return
    subject = ", ".join(names) if task.names is not None else f"every algorithm of {task.op}"
    raise ValueError(f"--levels: {subject} takes none, or names its own")


def _takes_levels(op: str, name: str) -> bool:
    try:
        found = algorithms.find(op, name)
    except UnsupportedError:
        return False  # an algorithm of another operation, which the simulator skips
    names_its_own = "dims=" in name or name.startswith("level")
    return not names_its_own and "dims" in {parameter.name for parameter in found.parameters}


def read_links(word: str, topology: Topology) -> list[int]:
    """Returns the ids of the directed links that a text names. `7` is an id; `0-1` means all links
    from node 0 to node 1.

    Raises ValueError.
    """
    try:
        ends = [int(end) for end in word.split("-")]
    except ValueError:
        ends = []
    if len(ends) == 1:
        return ends
    if len(ends) != 2:
        raise ValueError(f"{word}: expected a link's id or two nodes, as in 7 or 0-1")
    src, dst = ends
    found = np.flatnonzero((topology.links.src == src) & (topology.links.dst == dst))
    if not found.size:
        raise ValueError(f"{topology.name} has no link from node {src} to node {dst}")
    return [int(link) for link in found]


def read_conditions(options: SimulateOptions, topology: Topology) -> Conditions:
    """Converts options to the conditions of the simulation. Raises ValueError."""
    from unisono.simulator import Conditions, Endpoint

    failed_links = tuple(
        link for word in options.failed.split(",") if word for link in read_links(word, topology)
    )
    slow = {}
    for word in options.degraded.split(","):
        if word:
            links, part = _read_part(word)
            slow.update(dict.fromkeys(read_links(links, topology), part))
    model = options.model_path
    return Conditions(
        endpoint=Endpoint(overhead_s=options.overhead),
        failed=failed_links,
        degraded=slow,
        in_network=options.in_network,
        paths=options.paths,
        seed=options.seed,
        messages=None if model is None else read_model(model, options.op, topology.num_ranks),
    )


def _read_part(word: str) -> tuple[str, float]:
    links, _, part = word.partition("=")
    try:
        return links, float(part)
    except ValueError:
        raise ValueError(
            f"--degraded {word}: expected a link and a fraction, as in 5=0.5 or 0-1=0.5"
        ) from None


def read_model(path: Path, op: str, ranks: int) -> LinkModel:
    """Reads the link models in a file. Returns the model whose measurement is most similar to `op`
    on `ranks` ranks. Raises ValueError."""
    from unisono.simulator import models_of, nearest
    from unisono.text_files import reading

    with reading(path) as text:
        return nearest(models_of(text, source=path.name), op, ranks)


@contextmanager
def progress() -> Iterator[Show]:
    """Displays a progress bar on standard error. Yields a function that takes a name and a
    `Progress`."""
    with outputs.progress() as show:
        yield lambda name, at: show(name, at.done / max(1, at.total))

"""Measures the controller in the steady state of a program whose steps repeat.

In the case *300 tensors*, every rank submits the tensors and waits for all of them. The order
differs between ranks and steps. This is compared with one all_reduce of the same bytes, with copies
of all tensors in and out. In the case *one tensor*, a submission and its wait are compared with an
asynchronous all_reduce and its wait.

    python benchmarks/controller_steps.py                  # 2 and 4 ranks, about a minute
    python benchmarks/controller_steps.py --ranks 2 --rounds 5
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from timing import alternate, calls_within, microseconds, on_every, write

import unisono
from unisono.communicator import Communicator
from unisono.communicator.explain import time_s
from unisono.controller import Controller, ControllerStats

TENSORS = 300
SMALLEST, LARGEST = 1, 5000
"""Elements of float32: 4 B to 20 kB, together 3 MB."""
WARM_UP_STEPS = 150  # includes the steps, at most 133, that tune the fusion

Floats = NDArray[np.float32]
Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds per step of the slowest rank, one entry per round."""

    name: str
    ranks: int
    tensors: int
    nbytes: int
    controller_s: tuple[float, ...]
    direct_s: tuple[float, ...]
    collectives: float
    """Number of collectives that the controller runs in a step."""
    cache_hits: float
    """Fraction of all tensors that is in the frozen plan. For these, the ranks exchange no
    messages.
    """

    @property
    def added_us(self) -> float:
        """Microseconds per tensor that the controller adds to the time of direct calls."""
        added_s = median(self.controller_s) - median(self.direct_s)
        return 1e6 * added_s / self.tensors


# ---- code that runs on each rank


def make_tensors() -> list[Floats]:
    """Returns tensors whose lengths increase evenly from the smallest to the largest."""
    lengths = np.linspace(SMALLEST, LARGEST, TENSORS).astype(int)
    return [np.zeros(length, np.float32) for length in lengths]


def many_through_controller(controller: Controller, tensors: Sequence[Floats]) -> Step:
    """Returns a step that submits all tensors in a new random order and waits for all of them."""
    orders = np.random.default_rng(controller.rank)
    names = [f"layer{index}.weight" for index in range(len(tensors))]

    def call() -> None:
        order = orders.permutation(len(tensors)).tolist()
        handles = [controller.all_reduce(names[i], tensors[i], "max") for i in order]
        for handle in handles:
            handle.wait()

    return call


def many_at_once(comm: Communicator, tensors: Sequence[Floats]) -> Step:
    """Returns a step that copies all tensors into one, reduces this tensor, and copies the result
    back.
    """
    whole = np.empty(sum(map(len, tensors)), np.float32)
    parts = np.split(whole, np.cumsum([len(tensor) for tensor in tensors])[:-1])

    def call() -> None:
        for part, tensor in zip(parts, tensors, strict=True):
            part[:] = tensor
        comm.all_reduce(whole, "max")
        for part, tensor in zip(parts, tensors, strict=True):
            tensor[:] = part

    return call


def one_through_controller(controller: Controller, tensor: Floats) -> Step:
    return lambda: controller.all_reduce("one", tensor, "max").wait()


def one_direct(comm: Communicator, tensor: Floats) -> Step:
    return lambda: comm.all_reduce(tensor, "max", async_op=True).wait()


def verify(comm: Communicator, step: Step, tensors: Sequence[Floats]) -> None:
    """Raises `AssertionError` if a step computes wrong values."""
    for index, tensor in enumerate(tensors):
        tensor[:] = index + comm.rank
    step()
    for index, tensor in enumerate(tensors):
        assert (tensor == index + comm.size - 1).all(), index


def measure(rounds: int, round_s: float) -> list[Row]:
    """Measures all table rows for one number of ranks. Every rank calls this function."""
    with unisono.init() as comm:
        return list(_rows(comm, rounds, round_s))


def _rows(comm: Communicator, rounds: int, round_s: float) -> Iterator[Row]:
    many, one = make_tensors(), [np.zeros(2, np.float32)]
    for name, tensors in (("300 tensors", many), ("one tensor", one)):
        with Controller(comm) as controller:
            if tensors is many:
                steps = (many_through_controller(controller, many), many_at_once(comm, many))
            else:
                steps = (one_through_controller(controller, one[0]), one_direct(comm, one[0]))
            for step in steps:
                for _ in range(WARM_UP_STEPS):
                    verify(comm, step, tensors)
            often = [calls_within(round_s, time_s(comm, step, 2)) for step in steps]
            before = controller.stats()
            controller_s, direct_s = alternate(comm, steps, often, rounds)
            after = controller.stats()
            verify(comm, steps[0], tensors)
        submitted = after.tensors_submitted - before.tensors_submitted
        yield Row(
            name=name,
            ranks=comm.size,
            tensors=len(tensors),
            nbytes=sum(tensor.nbytes for tensor in tensors),
            controller_s=controller_s,
            direct_s=direct_s,
            collectives=_gain(before, after, "collectives_run") * len(tensors) / submitted,
            cache_hits=_gain(before, after, "cache_hits") / submitted,
        )


def _gain(before: ControllerStats, after: ControllerStats, field: str) -> int:
    return int(getattr(after, field) - getattr(before, field))


# ---- the main program


def render(rows: Sequence[Row]) -> Table:
    """Returns a table with medians and quartiles over the rounds."""
    table = Table(title="us a step")
    table.add_column("case")
    names = ("ranks", "kB", "controller", "direct", "ratio", "added us a tensor")
    for name in (*names, "collectives a step", "from the plan"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            str(row.ranks),
            f"{row.nbytes / 1e3:.0f}",
            microseconds(row.controller_s),
            microseconds(row.direct_s),
            f"{median(row.controller_s) / median(row.direct_s):.2f}",
            f"{row.added_us:.2f}",
            f"{row.collectives:.1f}",
            f"{row.cache_hits:.1%}",
        )
    return table


def main(
    *,
    ranks: Annotated[str, typer.Option(help="Rank counts, separated by commas.")] = "2,4",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each method.")] = 15,
    round_s: Annotated[float, typer.Option(help="Approximate seconds of a round.")] = 0.1,
    json_path: Annotated[Path, typer.Option("--json", help="File for all measurements.")] = Path(
        __file__
    ).parent
    / "results"
    / "controller-steps.json",
) -> None:
    rows, probes_s = on_every(ranks, measure, (rounds, round_s))
    Console(width=130).print(render(rows))
    write(json_path, rows, probes_s)


if __name__ == "__main__":
    typer.run(main)

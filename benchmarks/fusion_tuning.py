"""Compares a controller that tunes its fusion with a controller whose buckets follow from
`fusion_bytes`, in one run.

A step computes gradients one after another, submits each gradient, and waits for all. Instead of
computing, a step sleeps, as if an accelerator computed. First the tuner measures and decides. Its
steps run between two halves of an equal number of steps of the other controller, since the tuner
measures whole steps. After that, the steps of both controllers alternate.

*Link* cases use a `LinkTransfer` with known costs, so that the closed form gives the best of all
buckets. *Memory* cases use the communicator of this machine.

    python benchmarks/fusion_tuning.py                  # 2 ranks, about a minute
    python benchmarks/fusion_tuning.py --ranks 2,4 --steps 200
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from timing import on_every, write

import unisono
from unisono.communicator import Communicator
from unisono.controller import (
    CommunicatorTransfer,
    Controller,
    FusionReport,
    LinkCost,
    LinkTransfer,
    best_ends,
    finish_s,
)

TUNING_STEPS = 140
"""Steps after which the tuner has decided."""
_SLEEP_S = 300e-6

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Gradients of equal size. `cost` is the cost of a simulated link; None means this machine's
    own communicator.
    """

    name: str
    gradients: int
    elements: int
    compute_s: float
    """Seconds to compute one gradient."""
    cost: LinkCost | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of one gradient."""
        return 4 * self.elements

    @property
    def best_s(self) -> float | None:
        """Seconds of a step with the best buckets, by the closed form."""
        if self.cost is None:
            return None
        ready_s = [self.compute_s * (j + 1) for j in range(self.gradients)]
        sizes = [float(self.nbytes)] * self.gradients
        return finish_s(ready_s, sizes, best_ends(ready_s, sizes, self.cost), self.cost)


CASES = (
    Case(
        name="link: latency and rate matter",
        gradients=32,
        elements=16_384,
        compute_s=400e-6,
        cost=LinkCost(latency_s=500e-6, s_per_byte=5e-9),
    ),
    Case(
        name="link: latency rules",
        gradients=32,
        elements=2_048,
        compute_s=200e-6,
        cost=LinkCost(latency_s=2e-3, s_per_byte=1e-9),
    ),
    Case(
        name="link: rate rules",
        gradients=32,
        elements=65_536,
        compute_s=400e-6,
        cost=LinkCost(latency_s=50e-6, s_per_byte=2e-9),
    ),
    Case(name="memory: small", gradients=32, elements=4_096, compute_s=100e-6),
    Case(name="memory: 8 MB", gradients=32, elements=65_536, compute_s=300e-6),
    Case(name="memory: no overlap", gradients=100, elements=2_500, compute_s=0.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds of each step on the slowest rank, in the order in which the steps ran."""

    case: str
    ranks: int
    default_s: tuple[float, ...]
    tuned_s: tuple[float, ...]
    best_s: float | None
    report: dict[str, Any] | str


# ---- code that runs on each rank


class _Program:
    """A controller and the gradients that it exchanges."""

    def __init__(self, comm: Communicator, case: Case, *, tunes: bool) -> None:
        self._case = case
        transfer = CommunicatorTransfer.over(comm)
        self.controller = Controller(
            comm,
            tune_fusion=tunes,
            transfer=transfer if case.cost is None else LinkTransfer(transfer, case.cost),
        )
        self._names = [f"gradient {j}" for j in range(case.gradients)]
        self._arrays = [np.zeros(case.elements, np.float32) for _ in self._names]

    def step_s(self) -> float:
        """Computes and exchanges all gradients once, and checks their sums. Returns the seconds of
        the step.
        """
        rank, size = self.controller.rank, self.controller.size
        for array in self._arrays:
            array.fill(rank)
        begun_s = time.perf_counter()
        handles = []
        for j, (name, array) in enumerate(zip(self._names, self._arrays, strict=True)):
            _wait_until(begun_s + (j + 1) * self._case.compute_s)
            handles.append(self.controller.all_reduce(name, array))
        for handle in handles:
            handle.wait()
        seconds = time.perf_counter() - begun_s
        assert all((array == sum(range(size))).all() for array in self._arrays)
        return seconds


def _wait_until(until_s: float) -> None:
    while (left_s := until_s - time.perf_counter()) > 0:
        if left_s > _SLEEP_S:
            time.sleep(left_s - _SLEEP_S)


def measure(steps: int, only: str) -> list[Row]:
    """Measures all cases of one number of ranks. Runs on every rank."""
    with unisono.init() as comm:
        return [_row(comm, case, steps) for case in CASES if only in case.name]


def _row(comm: Communicator, case: Case, steps: int) -> Row:
    programs = [_Program(comm, case, tunes=tunes) for tunes in (False, True)]
    half = TUNING_STEPS // 2
    order = [0] * half + [1] * TUNING_STEPS + [0] * half
    order += [which for step in range(steps) for which in ((0, 1) if step % 2 else (1, 0))]
    times: list[list[float]] = [[], []]
    for which in order:
        comm.barrier()
        times[which].append(programs[which].step_s())
    report = programs[1].controller.fusion_report()
    comm.barrier()
    for program in programs:
        program.controller.close()
    slowest: Floats = np.array(times)
    comm.all_reduce(slowest, "max")
    return Row(
        case=case.name,
        ranks=comm.size,
        default_s=tuple(slowest[0].tolist()),
        tuned_s=tuple(slowest[1].tolist()),
        best_s=case.best_s,
        report="undecided" if report is None else _fields(report),
    )


def _fields(report: FusionReport) -> dict[str, Any]:
    return {"text": str(report)} | {
        name: getattr(report, name) for name in type(report).__slots__ if name != "buckets"
    }


# ---- the main program


def render(rows: Sequence[Row]) -> Table:
    """Returns a table of medians. `ratio` is the time of a tuned step divided by that of a default
    step, from alternating steps. `while tuning` is the same ratio for all steps during tuning.
    """
    table = Table(title="ms a step: the slowest rank, median")
    table.add_column("case")
    for name in ("ranks", "default", "tuned", "ratio", "best possible", "while tuning"):
        table.add_column(name, justify="right")
    table.add_column("decision")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> Iterator[str]:
    default, tuned = row.default_s[TUNING_STEPS:], row.tuned_s[TUNING_STEPS:]
    yield row.case
    yield str(row.ranks)
    yield f"{1e3 * median(default):.3f}"
    yield f"{1e3 * median(tuned):.3f}"
    yield f"{median(b / a for a, b in zip(default, tuned, strict=True)):.3f}"
    yield "" if row.best_s is None else f"{1e3 * row.best_s:.3f}"
    yield f"{sum(row.tuned_s[:TUNING_STEPS]) / sum(row.default_s[:TUNING_STEPS]):.3f}"
    yield row.report if isinstance(row.report, str) else row.report["text"]


def main(
    *,
    ranks: Annotated[str, typer.Option(help="Rank counts, separated by commas.")] = "2",
    steps: Annotated[int, typer.Option(min=10, help="Steps after the decision.")] = 150,
    only: Annotated[str, typer.Option(help="Part of the names of the cases to run.")] = "",
    json_path: Annotated[Path, typer.Option("--json", help="File for all measurements.")] = Path(
        __file__
    ).parent
    / "results"
    / "fusion-tuning.json",
) -> None:
    rows, probes_s = on_every(ranks, measure, (steps, only))
    Console(width=200).print(render(rows))
    write(json_path, rows, probes_s)


if __name__ == "__main__":
    typer.run(main)

"""Measures what an idle controller costs: processor time and wake-ups of all its threads.

The same process is also measured with a communicator only. For comparison, Horovod's loop wakes up
1,000 times a second, since its cycle time is 1 ms.

    python benchmarks/controller_idle.py                   # 2 and 4 ranks, about 20 s
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from timing import on_every, write

import unisono
from unisono.controller import Controller

WARM_UP_STEPS = 150  # includes the steps, at most 133, that tune the fusion
SILENCE_S = 2.0
"""After this the controller's thread sleeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleRow:
    """Costs of the busiest rank per second."""

    name: str
    ranks: int
    cpu_share: float
    """Seconds of processor time per second."""
    wake_ups: float


def measure(seconds: float) -> list[IdleRow]:
    """Measures an idle process that has a communicator, then the same process with a controller."""
    rows = []
    with unisono.init() as comm:
        rows.append(_row("communicator", comm, seconds))
        with Controller(comm) as controller:
            array = np.zeros(1000)
            for _ in range(WARM_UP_STEPS):
                controller.all_reduce("array", array).wait()
            time.sleep(SILENCE_S)
            rows.append(_row("controller, frozen plan", comm, seconds))
    return rows


def _row(name: str, comm: unisono.Communicator, seconds: float) -> IdleRow:
    comm.barrier()
    before, begun_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    time.sleep(seconds)
    after, took_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - begun_s
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    costs = np.array([cpu_s, after.ru_nvcsw - before.ru_nvcsw]) / took_s
    comm.all_reduce(costs, "max")
    return IdleRow(name=name, ranks=comm.size, cpu_share=costs[0], wake_ups=costs[1])


def render(rows: list[IdleRow]) -> Table:
    """Returns a table with a row for each kind of process and number of ranks."""
    table = Table(title="An idle process, per second")
    for name in ("process with", "ranks", "processor time", "wake-ups"):
        table.add_column(name)
    for row in rows:
        table.add_row(row.name, str(row.ranks), f"{row.cpu_share:.3%}", f"{row.wake_ups:.1f}")
    return table


def main(
    *,
    ranks: Annotated[str, typer.Option(help="Rank counts, separated by commas.")] = "2,4",
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a measurement.")] = 5.0,
    json_path: Annotated[Path, typer.Option("--json", help="File for all measurements.")] = Path(
        __file__
    ).parent
    / "results"
    / "controller-idle.json",
) -> None:
    rows, probes_s = on_every(ranks, measure, (seconds,))
    Console(width=100).print(render(rows))
    write(json_path, rows, probes_s)


if __name__ == "__main__":
    typer.run(main)

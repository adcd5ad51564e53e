"""Measures the bubbles of all pipeline schedules on stages that sleep, and compares them with
closed forms.

The forward pass, the input gradient and the weight gradient of a stage each sleep for a given time.
So the number of cores does not limit the ranks, and the schedule alone causes the bubble.

    python benchmarks/pipeline_bubbles.py               # pp = 2 and 4; 10 minutes
    python benchmarks/pipeline_bubbles.py --pass-s 0.02
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from timing import on_every, write
from torch import distributed as dist
from torch import nn

from unisono.parallel import Layout, ParallelRun, parallelize
from unisono.parallel.run.pipeline.model_stages import stage_count

SCHEDULES = (
    ("gpipe", 1, 1),
    ("1f1b", 1, 1),
    ("interleaved", 2, 1),
    ("zb1p", 1, 1),
    ("zbv", 1, 3),
    ("dualpipev", 1, 1),
)
"""Schedules, the chunks of a rank that the layout names, and a factor of the times of passes. The
bubbles of zbv are the shortest, so they need longer passes beside torch's time between passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The bubble of a schedule, as a share of a pipeline's time."""

    schedule: str
    stages: int
    chunks: int
    microbatches: int
    predicted: float
    measured: tuple[float, ...]
    """Measured bubble of each step."""

    @property
    def error(self) -> float:
        """Ratio of the measured to the predicted bubble, minus one."""
        return median(self.measured) / self.predicted - 1


class _SleepInInputs(torch.autograd.Function):
    """Sleeps in forward, and when it computes the gradient of the inputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pass_s: float) -> torch.Tensor:
        ctx.pass_s = pass_s
        time.sleep(pass_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.pass_s)
        return gradient, None


class _SleepInWeights(torch.autograd.Function):
    """Sleeps when it computes the gradient of the weights."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, pass_s: float) -> torch.Tensor:
        ctx.pass_s = pass_s
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.pass_s)
        return gradient, None


class SleepingLayer(nn.Module):
    """Scales its input. Every pass takes `pass_s` seconds."""

    def __init__(self, pass_s: float, *, is_first: bool) -> None:
        """Prepares the weight. On the first stage (`is_first`), torch computes no gradient of the
        inputs, so the gradient of the weights sleeps twice as long, and backward takes the same
        time on all stages.
        """
        super().__init__()
        self.pass_s = pass_s
        self.weight_s = 2 * pass_s if is_first else pass_s
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slow: torch.Tensor = _SleepInInputs.apply(x, self.pass_s)
        weight: torch.Tensor = _SleepInWeights.apply(self.weight, self.weight_s)
        return slow * weight


# ---- code that runs on each rank


def measure(pass_s: float, steps: int, schedules: str) -> list[Row]:
    """Measures all schedules that have as many stages as there are ranks. Runs on every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("unisono")
    try:
        return list(_rows(dist.get_world_size(), pass_s, steps, schedules.split(",")))
    finally:
        dist.destroy_process_group()


def _rows(stages: int, pass_s: float, steps: int, schedules: Sequence[str]) -> Iterator[Row]:
    for schedule, chunks, factor in SCHEDULES:
        if schedule not in schedules:
            continue
        layout = Layout(pp=stages, vpp=chunks, schedule=schedule)
        for microbatches in (stages, 2 * stages, 4 * stages):
            if microbatches < layout.rules.least_rounds * stages:
                continue
            run = sleeping_run(layout, microbatches, factor * pass_s)
            measured = _bubbles(run, microbatches, steps)
            yield Row(
                schedule=schedule,
                stages=stages,
                chunks=stage_count(layout) // stages,
                microbatches=microbatches,
                predicted=run.report().predicted.bubble,
                measured=measured,
            )


def sleeping_run(layout: Layout, microbatches: int, pass_s: float) -> ParallelRun:
    """Returns a run in which the passes of a rank's stages take `pass_s` seconds together."""
    count = stage_count(layout)
    pass_s *= layout.pp / count
    layers = [SleepingLayer(pass_s, is_first=number == 0) for number in range(count)]
    return parallelize(
        nn.Sequential(*layers),
        layout,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        microbatches=microbatches,
    )


def _bubbles(run: ParallelRun, microbatches: int, steps: int) -> tuple[float, ...]:
    inputs, targets = torch.ones(microbatches, 8), torch.zeros(microbatches, 8)
    run.step(inputs, targets)  # a warm-up, in which torch exchanges shapes
    found = []
    for _ in range(steps):
        # ranks begin together, since the wait for a late rank is not a bubble of the schedule
        dist.barrier()
        run.step(inputs, targets)
        found.append(run.report().bubble)
    return tuple(found)


# ---- the main program


def render(rows: Sequence[Row]) -> Table:
    """Returns a table of predicted and measured bubbles."""
    table = Table(title="bubble, part of a pipeline's time")
    for name in ("schedule", "stages", "chunks", "microbatches", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for row in rows:
        numbers = (row.stages, row.chunks, row.microbatches)
        shares = (f"{row.predicted:.4f}", f"{median(row.measured):.4f}", f"{row.error:+.1%}")
        table.add_row(row.schedule, *map(str, numbers), *shares)
    return table


def main(
    *,
    ranks: Annotated[str, typer.Option(help="Numbers of stages, separated by commas.")] = "2,4",
    pass_s: Annotated[float, typer.Option(help="Seconds of each pass of a stage.")] = 0.3,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each case.")] = 1,
    schedules: Annotated[str, typer.Option(help="Schedules, separated by commas.")] = ",".join(
        dict.fromkeys(schedule for schedule, _, _ in SCHEDULES)
    ),
    json_path: Annotated[Path, typer.Option("--json", help="File for all measurements.")] = Path(
        __file__
    ).parent
    / "results"
    / "pipeline-bubbles.json",
) -> None:
    rows, probes_s = on_every(ranks, measure, (pass_s, steps, schedules))
    Console(width=110).print(render(rows))
    write(json_path, rows, probes_s)


if __name__ == "__main__":
    typer.run(main)

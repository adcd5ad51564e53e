"""Trains a task with each parallel strategy, and writes predicted and measured bytes, memory and
times.

Every layout trains the same model on the same batches, so its losses must equal those of one
process.

    python benchmarks/predicted_bytes_memory.py            # about 3 minutes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from timing import write

from unisono.bench.core_latency import probe_core_latency_s
from unisono.planner import Layout
from unisono.train import LayoutRun, launch_layout

STEPS, BATCH, AGREEMENT = 6, 16, 1e-5
Task = Literal["text", "moe", "long"]
RUNS: tuple[tuple[Task, str, int, dict[str, Any]], ...] = (
    ("text", "dp=1", 1, {}),
    ("text", "dp=4", 1, {}),
    ("text", "dp=4,zero=1", 1, {}),
    ("text", "dp=4,zero=2", 1, {}),
    ("text", "dp=4,zero=3", 1, {}),
    ("text", "tp=4", 1, {}),
    ("text", "tp=4,sequence_parallel=1", 1, {}),
    ("text", "tp=4,tensor=2d", 1, {}),
    ("text", "tp=8,tensor=2.5d", 1, {}),
    ("text", "tp=8,tensor=3d", 1, {}),
    ("text", "pp=4,schedule=gpipe", 8, {}),
    ("text", "pp=4", 8, {}),
    ("text", "pp=2,vpp=2,schedule=interleaved", 8, {}),
    ("text", "pp=4,schedule=zb1p", 8, {}),
    ("text", "cp=4", 1, {}),
    ("text", "dp=2,tp=2,pp=2,zero=1", 4, {}),
    ("moe", "dp=1", 1, {}),
    ("moe", "dp=4,ep=4", 1, {}),
    ("moe", "dp=2,tp=2,ep=4", 1, {}),
    ("long", "dp=1", 1, {}),
    ("long", "cp=4", 1, {"context": "ring"}),
    ("long", "cp=4", 1, {"context": "allgather"}),
    ("long", "cp=2", 1, {"context": "ulysses"}),
)
"""Task, layout, microbatches and further settings. A task's first run is its one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Predicted and measured figures of one layout, by rank."""

    task: str
    layout: str
    microbatches: int
    settings: dict[str, Any]
    bytes_sent: dict[str, Any]
    memory: dict[str, Any]
    bubble: float
    step_s: float
    peak_bytes: list[int]
    predicted: dict[str, Any]
    loss_error: float
    """Largest relative difference between a loss of the layout and the same loss in one process."""


def measure() -> list[Row]:
    """Runs all layouts. Raises `AssertionError` if a layout's losses differ from those of one
    process.
    """
    alone: dict[str, list[float]] = {}
    rows = []
    for task, text, microbatches, settings in RUNS:
        layout = Layout.parse(text)
        result = launch_layout(
            LayoutRun(
                task=task,
                ranks=layout.devices,
                layout=layout,
                steps=STEPS,
                batch=BATCH,
                microbatches=microbatches,
                learning_rate=2e-3,
                clip=1.0,
                seed=0,
                **settings,
            ),
            lambda event: None,
        )
        losses = alone.setdefault(task, result["losses"])
        pairs = zip(result["losses"], losses, strict=True)
        error = max(abs(found / expected - 1) for found, expected in pairs)
        if error > AGREEMENT:
            raise AssertionError(f"{task}, {text}: the losses differ by {error:.1e}")
        names = ("bytes_sent", "memory", "bubble", "step_s", "peak_bytes", "predicted")
        rows.append(
            Row(
                task=task,
                layout=text,
                microbatches=microbatches,
                settings=settings,
                loss_error=error,
                **{name: result[name] for name in names},
            )
        )
    return rows


def render(rows: Sequence[Row]) -> Table:
    """Returns a table with the bytes of the rank that sends most, and the memory of the rank that
    uses most.
    """
    table = Table(title="KiB of a step: the largest of all ranks")
    for name in ("task", "layout", "sent", "weights", "gradients", "optimizer", "step ms"):
        table.add_column(name, justify="left" if name in ("task", "layout") else "right")
    for row in rows:
        sent = max(map(sum, zip(*row.bytes_sent.values(), strict=True)), default=0)
        kinds = [max(row.memory.get(kind, [0])) for kind in ("weights", "gradients", "optimizer")]
        sizes = [f"{nbytes / 1024:,.1f}" for nbytes in (sent, *kinds)]
        table.add_row(row.task, row.layout, *sizes, f"{1e3 * row.step_s:.1f}")
    return table


def main(
    *,
    json_path: Annotated[Path, typer.Option("--json", help="File for all measurements.")] = Path(
        __file__
    ).parent
    / "results"
    / "parallel-figures.json",
) -> None:
    probe_s = probe_core_latency_s()
    rows = measure()
    Console(width=110).print(render(rows))
    write(json_path, rows, [] if probe_s is None else [probe_s])


if __name__ == "__main__":
    typer.run(main)

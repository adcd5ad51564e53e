"""Forecasts and measured times of training steps, side by side, for layouts of 2 and 4 ranks.

Each run profiles the model, forecasts a step, and then trains: `unisono train text --predict`.
Rounds alternate over the layouts, so that disturbances of the machine reach all of them.

    python benchmarks/step_forecasts.py            # about 5 minutes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from timing import write

from unisono.bench.core_latency import probe_core_latency_s
from unisono.planner import Layout
from unisono.train import LayoutRun, launch_layout

STEPS, BATCH, MICROBATCHES, ROUNDS = 25, 16, 4, 3
LAYOUTS = (
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=3",
    "tp=2",
    "cp=2",
    "pp=2",
    "dp=4",
    "dp=2,tp=2",
    "dp=2,pp=2",
    "dp=4,zero=3",
    "tp=4",
    "pp=4",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The forecasts and the measured times of a layout. Each round gives one of both."""

    layout: str
    ranks: int
    forecast_s: list[float]
    parts_s: dict[str, float]
    """Parts of the last forecast."""
    measured_s: list[float]

    @property
    def error(self) -> float:
        """Relative error of the median forecast."""
        return median(self.forecast_s) / median(self.measured_s) - 1


def measure() -> list[Row]:
    """Runs all rounds."""
    found: dict[str, list[dict[str, Any]]] = {text: [] for text in LAYOUTS}
    for _ in range(ROUNDS):
        for text in LAYOUTS:
            found[text].append(_run(text))
    return [_row(text, results) for text, results in found.items()]


def _run(text: str) -> dict[str, Any]:
    layout = Layout.parse(text)
    run = LayoutRun(
        task="text",
        ranks=layout.devices,
        layout=layout,
        steps=STEPS,
        batch=BATCH,
        microbatches=MICROBATCHES,
        learning_rate=2e-3,
        clip=1.0,
        seed=0,
        predicts=True,
    )
    return launch_layout(run, lambda event: None)


def _row(text: str, results: Sequence[dict[str, Any]]) -> Row:
    return Row(
        layout=text,
        ranks=Layout.parse(text).devices,
        forecast_s=[each["predicted"]["step_s"] for each in results],
        parts_s=results[-1]["predicted"]["step_parts"],
        measured_s=[each["step_s"] for each in results],
    )


def render(rows: Sequence[Row]) -> Table:
    """Returns a table with the medians over the rounds."""
    table = Table(title="milliseconds of a step: median over the rounds")
    for name in ("layout", "forecast", "measured", "error"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for row in rows:
        times = [f"{1e3 * median(each):.1f}" for each in (row.forecast_s, row.measured_s)]
        table.add_row(row.layout, *times, f"{row.error:+.0%}")
    return table


def main(
    *,
    json_path: Annotated[Path, typer.Option("--json", help="File for all measurements.")] = Path(
        __file__
    ).parent
    / "results"
    / "step-forecasts.json",
) -> None:
    """Measures, prints a table, and writes the document."""
    probe_s = probe_core_latency_s()
    rows = measure()
    Console().print(render(rows))
    write(json_path, rows, [] if probe_s is None else [probe_s])


if __name__ == "__main__":
    typer.run(main)

"""Tables of a layout's run: its losses, and its predicted and measured figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from unisono import pipeline

_SHOWN_RANKS = 8
_SHOWN_LOSSES = 5
_KIBIBYTE = 1024.0


def title(task: str, layout_text: str, result: Mapping[str, Any]) -> str:
    """Returns the heading: the task, the layout, and the size of the model."""
    return f"{task} with {layout_text}: {result['parameters']:,} parameters"


def loss_line(result: Mapping[str, Any]) -> str:
    """Returns the first and last losses in one line."""
    losses = result["losses"]
    if len(losses) <= 2 * _SHOWN_LOSSES:
        return "losses " + " ".join(f"{loss:.6f}" for loss in losses)
    first = " ".join(f"{loss:.6f}" for loss in losses[:_SHOWN_LOSSES])
    last = " ".join(f"{loss:.6f}" for loss in losses[-_SHOWN_LOSSES:])
    return f"losses {first} ... {last}"


def figures_table(result: Mapping[str, Any]) -> Table:
    """Returns a table of bytes sent by axis and memory by kind, measured and predicted.

    The last row is the peak memory of each rank's process, which is not predicted.
    """
    ranks = len(result["peak_bytes"])
    table = Table(caption="KiB of a step by rank; where two numbers differ: measured (predicted)")
    table.add_column("figure")
    for rank in range(min(ranks, _SHOWN_RANKS)):
        table.add_column(f"rank {rank}", justify="right")
    if ranks > _SHOWN_RANKS:
        table.add_column("...")
    predicted = result["predicted"]
    for axis, measured in result["bytes_sent"].items():
        table.add_row(f"sent on {axis}", *_cells(measured, predicted["bytes_sent"].get(axis)))
    for kind, measured in result["memory"].items():
        table.add_row(kind, *_cells(measured, predicted["memory"].get(kind)))
    table.add_row("peak of the process", *_cells(result["peak_bytes"], None))
    return table


def tables_table(result: Mapping[str, Any]) -> Table:
    """Returns a table of each embedding table's ranks.

    The caption compares the load of the most loaded rank with the mean.
    """
    loads = result["table_loads"]
    mean = sum(loads) / len(loads)
    text = "bytes exchanged for tables, most loaded rank: "
    text += f"{max(loads) / mean:.2f} of the mean" if mean else "none"
    table = Table(caption=text)
    for name in ("table", "rows", "ids", "kind", "ranks"):
        table.add_column(name, justify="left" if name in ("kind", "ranks") else "right")
    for number, each in enumerate(result["tables"]):
        ranks = " ".join(str(rank) for rank in each["ranks"])
        sizes = f"{each['rows']:,}", str(each["ids"])
        table.add_row(str(number), *sizes, each["kind"], ranks)
    return table


def time_line(result: Mapping[str, Any]) -> str:
    """Returns a step's time, its tokens, exposed communication, and a pipeline's bubble (share of
    waiting), in one line."""
    exposed_ms = max(result["exposed_s"]) * 1e3
    unit = "tokens" if "tokens_per_s" in result else "samples"
    text = f"step {result['step_s'] * 1e3:.1f} ms, {result[f'{unit}_per_s']:,.0f} {unit} a second"
    text += f", {exposed_ms:.1f} ms of exchanges after the passes"
    if "step_s" in result["predicted"]:
        text += f", {_forecast(result['predicted'])}"
    if result["layout"]["pp"] == 1:
        return text
    return (
        f"{text}; bubble {result['bubble']:.1%} measured, {result['predicted']['bubble']:.1%} "
        "predicted for equal stages on cores of their own"
    )


def _forecast(predicted: Mapping[str, Any]) -> str:
    """Returns the predicted time of a step and its parts."""
    sums = " + ".join(
        f"{name.removesuffix('_s')} {seconds * 1e3:.1f}"
        for name, seconds in predicted["step_parts"].items()
        if seconds
    )
    return f"predicted {predicted['step_s'] * 1e3:.1f} ms = {sums}"


def save_passes_plot(passes: Mapping[str, Any], path: Path) -> None:
    """Draws the passes of a result in two panels: predicted and measured."""
    runs = {f"{name} passes": _task_run(rows) for name, rows in passes.items()}
    pipeline.save_task_plot(runs, path)


def _task_run(rows: Sequence[Any]) -> pipeline.TaskRun:
    return pipeline.TaskRun(
        spans=tuple(
            tuple(
                pipeline.TaskSpan(pipeline.StageTask(*task), begin_s, end_s)
                for task, begin_s, end_s in row
            )
            for row in rows
        )
    )


def _cells(measured: Sequence[float], predicted: Sequence[float] | None) -> list[str]:
    cells = []
    for rank, value in enumerate(measured[:_SHOWN_RANKS]):
        text = f"{value / _KIBIBYTE:,.1f}"
        if predicted is not None and round(predicted[rank]) != round(value):
            text += f" ({predicted[rank] / _KIBIBYTE:,.1f})"
        cells.append(text)
    return cells

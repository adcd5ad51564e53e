"""Draws four possible bottlenecks of a layout: memory, performance, communication and tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.figures import new_figure, svg_text
from unisono.planner.prediction import Prediction

_COMPUTATION = (
    *("matmul", "attention", "memory", "recompute", "output", "sums", "optimizer", "host", "step"),
)
_WAITS = ("bubble", "straggler")
_MOST_LAYOUTS = 12


def save_bottleneck_plot(
    predictions: Sequence[Prediction], path: str | Path, *, title: str = ""
) -> None:
    """Writes a PNG or SVG with four panels: three of the first (best) prediction, one of all.

    Memory: bytes of a device by kind and stage, below its capacity. Performance: seconds of a step
    for computation, for waits and for exchanges. Communication: seconds of exchanges that
    computation does not hide. Tuning: all predictions with their intervals, best first. Raises
    UnsupportedError without matplotlib.
    """
    _figure(predictions, title).savefig(path, dpi=120)


def bottleneck_svg(predictions: Sequence[Prediction], *, title: str = "") -> str:
    """Returns the picture of `save_bottleneck_plot` as the text of an SVG file."""
    return svg_text(_figure(predictions, title))


def _figure(predictions: Sequence[Prediction], title: str) -> Any:
    best = predictions[0]
    figure = new_figure(11, 8)
    figure.suptitle(f"{title}: {best.layout.text()}" if title else best.layout.text())
    (memory, performance), (communication, tuning) = figure.subplots(2, 2)
    _draw_memory(memory, best)
    exchanges = {
        kind: seconds
        for kind, seconds in best.time.items()
        if kind not in _COMPUTATION + _WAITS and seconds > 0
    }
    parts = {kind: best.time[kind] for kind in _COMPUTATION + _WAITS if best.time.get(kind)}
    parts["exchanges"] = sum(exchanges.values())
    _draw_times(performance, parts, f"performance: {best.mfu:.0%} of the peak", best.step_s)
    share = parts["exchanges"] / best.step_s
    _draw_times(
        communication, exchanges, f"communication: {share:.1%} of a step, not hidden", best.step_s
    )
    _draw_layouts(tuning, predictions[:_MOST_LAYOUTS])
    return figure


def _draw_memory(axes: Any, best: Prediction) -> None:
    stages = len(next(iter(best.memory.values())))
    filled = [0.0] * stages
    for kind, row in best.memory.items():
        if any(row):
            values = [nbytes / 1e9 for nbytes in row]
            axes.bar(range(stages), values, bottom=filled, label=kind)
            filled = [below + value for below, value in zip(filled, values, strict=True)]
    axes.axhline(best.capacity_bytes / 1e9, color="black", linestyle="--", label="capacity")
    axes.set_title(f"memory: {best.memory_bytes / best.capacity_bytes:.0%} of the fullest device")
    axes.set_ylim(top=1.45 * max(best.capacity_bytes / 1e9, *filled))  # leaves room for the legend
    axes.set_xlabel("stage")
    axes.set_ylabel("GB")
    axes.legend(fontsize="small", ncols=2)


def _draw_times(axes: Any, parts: Mapping[str, float], title: str, step_s: float) -> None:
    names = list(parts)
    bars = axes.barh(names, [parts[name] for name in names])
    axes.bar_label(bars, [f"{parts[name] / step_s:.1%}" for name in names], padding=2, size=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(title)
    axes.set_xlabel(f"seconds of a step of {step_s:.4g} s")


def _draw_layouts(axes: Any, predictions: Sequence[Prediction]) -> None:
    steps = [each.step_s for each in predictions]
    errors = (
        [each.step_s - each.low_s for each in predictions],
        [each.high_s - each.step_s for each in predictions],
    )
    names = [f"{each.layout.text()} micro{each.job.micro_batch}" for each in predictions]
    axes.errorbar(steps, range(len(steps)), xerr=errors, fmt="o", ecolor="lightgrey")
    axes.set_yticks(range(len(steps)), names, size=8)
    axes.invert_yaxis()
    worst = f", the last {steps[-1] / steps[0] - 1:+.1%}" if len(steps) > 1 else ""
    axes.set_title(f"tuning: {len(steps)} layouts, best first{worst}")
    axes.set_xlabel("seconds of a step, 80 % interval")

"""Draws a Pareto front: time over devices, coloured by free memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unisono.figures import new_figure
from unisono.planner.prediction import Prediction


def save_front_plot(front: Sequence[Prediction], path: str | Path, *, title: str = "") -> None:
    """Writes the front as a PNG or SVG. Raises UnsupportedError without matplotlib."""
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    devices = [each.layout.devices for each in front]
    free = [100 * (1 - each.memory_bytes / each.capacity_bytes) for each in front]
    steps = [each.step_s for each in front]
    errors = (
        [each.step_s - each.low_s for each in front],
        [each.high_s - each.step_s for each in front],
    )
    axes.errorbar(devices, steps, yerr=errors, fmt="none", ecolor="lightgrey", zorder=1)
    points = axes.scatter(devices, steps, c=free, cmap="viridis", vmin=0, vmax=100, zorder=2)
    figure.colorbar(points, label="free memory of the fullest device (%)")
    counts = sorted(set(devices))
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_yscale("log")
    axes.set_xlabel("devices")
    axes.set_ylabel("time of a step (s), 80 % interval")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)

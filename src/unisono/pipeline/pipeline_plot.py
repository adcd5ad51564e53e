"""Draws the tasks of a pipeline over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.figures import new_figure, svg_text
from unisono.pipeline.task_simulation import TaskRun

_COLOURS = {"F": "#8ecae6", "B": "#ffb703", "I": "#ffb703", "W": "#90be6d"}
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_MOST_LABELS = 400


def save_task_plot(runs: Mapping[str, TaskRun], path: str | Path) -> None:
    """Writes one panel for each run, under its title, as a PNG or SVG.

    Each rank has a row, and each task a bar, labelled with its microbatch. Tasks of the second and
    later stages of a rank are darker. Raises UnsupportedError without matplotlib.
    """
    _figure(runs).savefig(path, dpi=120)


def task_svg(runs: Mapping[str, TaskRun]) -> str:
    """Returns the picture of `save_task_plot` as the text of an SVG file.

    Raises UnsupportedError without matplotlib.
    """
    return svg_text(_figure(runs))


def _figure(runs: Mapping[str, TaskRun]) -> Any:
    rows = max(len(run.spans) for run in runs.values())
    figure = new_figure(11, 1.2 + len(runs) * (0.9 + 0.4 * rows))
    panels = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
    for axes, (title, run) in zip(panels, runs.items(), strict=True):
        first_s = min(span.begin_s for row in run.spans for span in row)
        labels = sum(map(len, run.spans)) <= _MOST_LABELS
        for rank, row in enumerate(run.spans):
            lowest = min((span.task.stage for span in row), default=0)
            for task, begin_s, end_s in row:
                left_s, width_s = begin_s - first_s, end_s - begin_s
                alpha = 0.6 if task.stage == lowest else 1.0
                axes.barh(
                    rank, width_s, left=left_s, color=_COLOURS[task.kind], alpha=alpha,
                    edgecolor="white", linewidth=0.5, label=_NAMES[task.kind],
                )  # fmt: skip
                if labels:
                    place = (left_s + width_s / 2, rank)
                    axes.annotate(str(task.microbatch), place, ha="center", va="center", size=7)
        axes.set_title(f"{title}: bubble {run.bubble:.1%}")
        axes.set_yticks(range(len(run.spans)), [f"rank {rank}" for rank in range(len(run.spans))])
        axes.invert_yaxis()
        handles, names = axes.get_legend_handles_labels()
        unique = dict(zip(names, handles, strict=True))
        axes.legend(unique.values(), unique.keys(), loc="upper left", bbox_to_anchor=(1, 1))
    panels[-1].set_xlabel("time (s)")
    return figure

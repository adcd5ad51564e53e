"""Draws predicted over measured step times of published runs."""

from __future__ import annotations

from pathlib import Path

from unisono.figures import new_figure
from unisono.planner.validation.ground_truth import measured_runs
from unisono.planner.validation.predicted_runs import fold_constants, predict_run


def save_validation_plot(path: str | Path) -> None:
    """Writes two panels as a PNG or SVG: predicted over measured time, and the error by size.

    Predictions are held out: their constants were fitted to all other families. Raises
    UnsupportedError without matplotlib.
    """
    figure = new_figure(11, 5)
    folds, runs = fold_constants(), measured_runs()
    times, errors = figure.subplots(1, 2)
    for family in dict.fromkeys(run.family for run in runs):
        members = [run for run in runs if run.family == family]
        measured = [run.measured_s for run in members]
        predicted = [predict_run(run, folds[family]).step_s for run in members]
        ratios = [p / m for p, m in zip(predicted, measured, strict=True)]
        style = {"s": 9, "alpha": 0.6, "label": family}
        times.scatter(measured, predicted, **style)
        errors.scatter([run.model.parameters for run in members], ratios, **style)
    ends = [min(run.measured_s for run in runs), max(run.measured_s for run in runs)]
    times.plot(ends, ends, color="black", linewidth=0.8)
    errors.axhline(1, color="black", linewidth=0.8)
    times.set(xscale="log", yscale="log", xlabel="measured step (s)", ylabel="predicted step (s)")
    errors.set(xscale="log", xlabel="parameters of the model", ylabel="predicted / measured")
    for panel in (times, errors):
        panel.grid(alpha=0.3)
    times.legend(fontsize=7)
    figure.savefig(path, dpi=110)

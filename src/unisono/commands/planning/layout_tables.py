"""Tables and JSON of layouts: the results of a search, one layout, or a Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from unisono import planner
from unisono.commands.planning.plan_inputs import PlanInputs
from unisono.commands.planning.plan_options import PlanOptions
from unisono.planner import Prediction, SearchCounts
from unisono.planner.recommendation import DlrmPrediction

_TOLERANCE = 0.05
"""Fraction of the step time or of the memory capacity that a further layout of the front must
save."""


@dataclass(frozen=True, kw_only=True)
class PlanOutput:
    """The output of the command: `parts` to print, a `document` to write as JSON, and the files
    that are `written`."""

    parts: list[Any]
    """Tables and texts to print, in order."""
    document: dict[str, Any]
    written: list[Path] = field(default_factory=list)


def layouts_output(inputs: PlanInputs, options: PlanOptions) -> tuple[PlanOutput, Prediction]:
    """Returns the output of a search or of one given layout, and the best prediction."""
    predictions, notes, counts = _predictions(inputs, options)
    parts_too = options.objective in ("cost", "devices")
    table = _table(predictions, notes, inputs.title, with_devices=parts_too)
    parts: list[Any] = [table, f"[dim]{counts}[/]"] if counts else [table]
    if inputs.calibration is not None:
        parts.append(f"first layout: {predictions[0].interval_text()}")
    if options.explain:
        parts.append(str(predictions[0].explain()))
    written = []
    if options.save_path is not None:
        predictions[0].layout.save(options.save_path)
        written.append(options.save_path)
    if options.plot_path is not None:
        planner.save_bottleneck_plot(predictions, options.plot_path, title=inputs.title)
        written.append(options.plot_path)
    document = {"layouts": [prediction_document(each) for each in predictions]}
    return PlanOutput(parts=parts, document=document, written=written), predictions[0]


def _predictions(
    inputs: PlanInputs, options: PlanOptions
) -> tuple[list[Prediction], list[str], str]:
    """Returns the predictions, a note for each prediction, and a line about the search."""
    model, cluster, job = inputs.model, inputs.cluster, inputs.job
    if inputs.layout is not None:
        found = planner.predict(model, cluster, inputs.layout, job, calibration=inputs.calibration)
        return [found], [_fit_text(found, inputs)], ""
    candidates = planner.search(
        model,
        cluster,
        job,
        objective=options.objective,
        longest_s=options.longest_s,
        keep=options.keep,
        calibration=inputs.calibration,
    )
    notes = [each.next_lost for each in candidates]
    return [each.prediction for each in candidates], notes, _counts_text(candidates.counts)


def _counts_text(counts: SearchCounts) -> str:
    return (
        f"{counts.considered} combinations: {counts.predicted} predicted, {counts.too_large} too "
        f"large for the memory, {counts.bounded} worse by their lower bound"
    )


def _fit_text(prediction: Prediction, inputs: PlanInputs) -> str:
    """Returns the smallest change that makes a layout fit into memory, or an empty text if the
    layout fits."""
    if prediction.fits:
        return ""
    change = planner.smallest_change(
        inputs.model,
        inputs.cluster,
        prediction.layout,
        prediction.job,
        calibration=inputs.calibration,
    )
    if change is None:
        return "does not fit; no two changes make it fit"
    return f"does not fit; fits with {change.text}: {change.prediction.step_s:.4g} s"


def front_output(inputs: PlanInputs, options: PlanOptions) -> PlanOutput:
    """Returns the output of a Pareto front of step time, devices and memory."""
    front = planner.pareto_front(
        inputs.model,
        inputs.cluster,
        inputs.job,
        tolerance=_TOLERANCE,
        calibration=inputs.calibration,
    )
    written = []
    if options.plot_path is not None:
        planner.save_front_plot(front, options.plot_path, title=inputs.title)
        written.append(options.plot_path)
    table = _table(front, [""] * len(front), f"{inputs.title}: Pareto front", with_devices=True)
    table.caption = (
        "No layout beats another one in step time, devices and memory together. Layouts that "
        f"save less than {_TOLERANCE:.0%} of the time and of the capacity are left out."
    )
    document = {"front": [prediction_document(each) for each in front]}
    return PlanOutput(parts=[table], document=document, written=written)


def _table(
    predictions: Sequence[Prediction],
    notes: Sequence[str],
    title: str,
    *,
    with_devices: bool,
) -> Table:
    table = Table(title=title, title_justify="left")
    names = ["layout", "micro", "recompute", "step", "80 % interval", "memory", "MFU"]
    for name in ["devices", *names] if with_devices else names:
        table.add_column(name, justify="left" if name in ("layout", "recompute") else "right")
    with_notes = any(notes)
    if with_notes:
        table.add_column("the next one" if len(predictions) > 1 else "what fits")
    for each, note in zip(predictions, notes, strict=True):
        table.add_row(
            *([str(each.layout.devices)] if with_devices else []),
            each.layout.text(),
            str(each.job.micro_batch),
            each.job.recompute,
            f"{each.step_s:.4g} s",
            f"{each.low_s:.4g} to {each.high_s:.4g} s",
            f"{each.memory_bytes / 1e9:.1f} GB",
            f"{each.mfu:.1%}",
            *([note] if with_notes else []),
        )
    return table


def prediction_document(prediction: Prediction) -> dict[str, Any]:
    """Returns a prediction as JSON."""
    return {
        **common_document(prediction),
        "memory_bytes_by_kind_and_stage": dict(prediction.memory),
        "tokens_per_s": prediction.tokens_per_s,
        "own_runs": prediction.own_runs,
    }


def common_document(prediction: Prediction | DlrmPrediction) -> dict[str, Any]:
    """Returns the entries that the predictions of all kinds of models have in JSON."""
    return {
        "layout": asdict(prediction.layout),
        "job": asdict(prediction.job),
        "devices": prediction.layout.devices,
        "step_s": prediction.step_s,
        "low_s": prediction.low_s,
        "high_s": prediction.high_s,
        "time_s": dict(prediction.time),
        "memory_bytes": prediction.memory_bytes,
        "capacity_bytes": prediction.capacity_bytes,
        "mfu": prediction.mfu,
    }

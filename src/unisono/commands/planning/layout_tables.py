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
from unisono.planner import Candidate, Candidates, Prediction, SearchCounts
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
    if inputs.layout is not None:
        found = planner.predict(
            inputs.model,
            inputs.cluster,
            inputs.layout,
            inputs.job,
            calibration=inputs.calibration,
        )
        predictions = [found]
        parts: list[Any] = [layout_table(predictions, options, inputs.title)]
        if not found.fits:
            parts.append(fit_text(found, inputs))
        documents = [prediction_document(found)]
    else:
        candidates = searched(inputs, options)
        predictions = [each.prediction for each in candidates]
        parts = search_parts(candidates, options, inputs.title)
        documents = [candidate_document(each) for each in candidates]
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
    document = {"layouts": documents}
    return PlanOutput(parts=parts, document=document, written=written), predictions[0]


def searched(inputs: PlanInputs, options: PlanOptions) -> Candidates:
    """Returns the result of the search that the options describe."""
    return planner.search(
        inputs.model,
        inputs.cluster,
        inputs.job,
        objective=options.wanted,
        longest_s=options.longest_step_s(inputs.job.tokens),
        headroom=options.headroom,
        keep=options.keep,
        schedules=options.schedules.split(","),
        calibration=inputs.calibration,
    )


def search_parts(candidates: Candidates, options: PlanOptions, title: str) -> list[Any]:
    """Returns what a search prints: the rows, their differences, ties, and the counts."""
    predictions = [each.prediction for each in candidates]
    return [
        layout_table(predictions, options, title),
        *_difference_parts(candidates),
        *filter(None, [_headroom_text(predictions[0], options.headroom)]),
        f"[dim]{_counts_text(candidates.counts)}[/]",
    ]


def _headroom_text(best: Prediction, wanted: float) -> str:
    """Returns a warning if no layout leaves the wanted share of the memory free, else nothing."""
    share = best.headroom_bytes / best.capacity_bytes
    if share >= wanted:
        return ""
    return (
        f"no layout leaves {wanted:.0%} of the memory free, so all that fit were considered; row 1 "
        f"leaves {share:.0%}, and predicted memory has an error of about 10%"
    )


def _difference_parts(candidates: Candidates) -> list[Any]:
    """Returns a table of the differences between the rows, and a line about ties."""
    table = Table(title="what the rows differ in", title_justify="left")
    table.add_column("row", justify="right")
    ordered = candidates.objective in ("time", "cost")
    if ordered:
        table.add_column("better than row 1", justify="right")
    table.add_column("other settings of the row", ratio=1)
    table.add_column("the next row", ratio=1)
    for number, each in enumerate(candidates, 1):
        best_s = each.prediction.step_s
        others = [f"{a.text} {a.step_s / best_s - 1:+.1%}" for a in each.alternatives[:5]]
        chance = "" if number == 1 else f"{each.chance:.0%}"
        row = [str(number), *([chance] if ordered else []), ", ".join(others), each.next_lost]
        table.add_row(*row)
    return [table, *filter(None, [candidates.tie_text()])]


def _counts_text(counts: SearchCounts) -> str:
    return (
        f"{counts.considered} combinations: {counts.predicted} predicted, {counts.too_large} too "
        f"large for the memory, {counts.bounded} worse by their lower bound"
    )


def fit_text(prediction: Prediction, inputs: PlanInputs) -> str:
    """Returns the smallest change that makes a layout that is too large fit into memory."""
    change = planner.smallest_change(
        inputs.model,
        inputs.cluster,
        prediction.layout,
        prediction.job,
        calibration=inputs.calibration,
    )
    if change is None:
        return "does not fit; no two changes make it fit; leave --layout out to search all layouts"
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
    table = layout_table(front, options, f"{inputs.title}: Pareto front", with_devices=True)
    table.caption = (
        "No layout beats another one in step time, devices and memory together. Layouts that "
        f"save less than {_TOLERANCE:.0%} of the time and of the capacity are left out."
    )
    document = {"front": [prediction_document(each) for each in front]}
    return PlanOutput(parts=[table], document=document, written=written)


def layout_table(
    predictions: Sequence[Prediction],
    options: PlanOptions,
    title: str,
    *,
    with_devices: bool = False,
) -> Table:
    """Returns a table with one row for each prediction."""
    table = Table(title=title, title_justify="left")
    many = with_devices or options.wanted in ("cost", "devices")
    names = ["row", *(["devices"] if many else []), "layout", "micro", "recompute", "step"]
    names += ["80 % interval", "tokens/s", "a device", "MFU", "live", "reserved", "headroom"]
    names += ["in the host"] if options.offload else []
    for name in [*names, *(["cost of 1e9"] if options.price is not None else [])]:
        table.add_column(name, justify="left" if name in ("layout", "recompute") else "right")
    for number, each in enumerate(predictions, 1):
        row = [
            str(number),
            *([str(each.layout.devices)] if many else []),
            each.layout.text(),
            str(each.job.micro_batch),
            str(each.job.recompute),
            f"{each.step_s:.4g} s",
            f"{each.low_s:.4g} to {each.high_s:.4g} s",
            f"{each.tokens_per_s:,.0f}",
            f"{each.tokens_per_s / each.layout.devices:,.0f}",
            f"{each.mfu:.1%}",
            f"{each.live_bytes / 1e9:.1f} GB",
            f"{each.memory_bytes / 1e9:.1f} GB",
            f"{each.headroom_bytes / 1e9:.1f} GB{', tight' if each.tight else ''}",
        ]
        if options.offload:
            row.append(f"{each.host_bytes / 1e9:.1f} GB")
        if options.price is not None:
            hours = 1e9 / each.tokens_per_s / 3600 * each.layout.devices
            row.append(f"{hours * options.price:,.2f}")
        table.add_row(*row)
    return table


def candidate_document(candidate: Candidate) -> dict[str, Any]:
    """Returns a candidate of a search as JSON."""
    return {
        **prediction_document(candidate.prediction),
        "next_lost": candidate.next_lost,
        "chance": candidate.chance,
        "alternatives": [each._asdict() for each in candidate.alternatives],
    }


def prediction_document(prediction: Prediction) -> dict[str, Any]:
    """Returns a prediction as JSON."""
    return {
        **common_document(prediction),
        "memory_bytes_by_kind_and_stage": dict(prediction.memory),
        "live_bytes": prediction.live_bytes,
        "headroom_bytes": prediction.headroom_bytes,
        "tight": prediction.tight,
        "tokens_per_s": prediction.tokens_per_s,
        "host_bytes": prediction.host_bytes,
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

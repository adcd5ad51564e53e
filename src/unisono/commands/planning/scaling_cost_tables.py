"""Tables of predictions beyond the step time: scaling, cost, checkpoints and sensitivity."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from unisono import planner
from unisono.commands.planning.layout_tables import PlanOutput, prediction_document
from unisono.commands.planning.plan_inputs import PlanInputs
from unisono.commands.planning.plan_options import PlanOptions
from unisono.planner import CheckpointPlan, Prediction


def scaling_output(inputs: PlanInputs, options: PlanOptions) -> PlanOutput:
    """Returns the output of a scaling curve."""
    curve = planner.scaling_curve(
        inputs.model,
        inputs.cluster,
        inputs.job,
        weak=options.weak,
        calibration=inputs.calibration,
    )
    kind = "weak" if options.weak else "strong"
    table = Table(title=f"{inputs.title}: {kind} scaling", title_justify="left")
    names = ("devices", "layout", "step", "80 % interval", "tokens/s", "speedup", "scale factor")
    for name in names:
        table.add_column(name, justify="left" if name == "layout" else "right")
    for point in curve:
        step = point.prediction
        table.add_row(
            str(point.devices),
            step.layout.text(),
            f"{step.step_s:.4g} s",
            f"{step.low_s:.4g} to {step.high_s:.4g} s",
            f"{step.tokens_per_s:.4g}",
            f"{point.speedup:.2f}",
            f"{point.scale_factor:.1%}",
        )
    table.caption = "speedup and scale factor: in comparison with the fewest devices."
    document = [
        {
            "devices": point.devices,
            "speedup": point.speedup,
            "scale_factor": point.scale_factor,
            **prediction_document(point.prediction),
        }
        for point in curve
    ]
    return PlanOutput(parts=[table], document={"scaling": document})


def of_best(
    inputs: PlanInputs, options: PlanOptions, best: Prediction
) -> list[tuple[str, Any, Any]]:
    """Returns the requested outputs for the best layout, each as (name, table or text,
    document)."""
    found: list[tuple[str, Any, Any]] = []
    checkpoints = None
    if options.checkpoints:
        checkpoints = _checkpoints(options, best)
        found.append(("checkpoints", _checkpoint_text(checkpoints), asdict(checkpoints)))
    if options.tokens is not None:
        goodput = checkpoints.goodput if checkpoints else 1.0
        found.append(("training", *_training(options, best, goodput)))
    if options.sensitivity:
        found.append(("sensitivity", *_sensitivity(inputs, best)))
    return found


def _checkpoints(options: PlanOptions, best: Prediction) -> CheckpointPlan:
    hours = options.failure_hours
    if hours is None:
        return planner.checkpoint_plan(best, storage_Bps=options.storage)
    if not hours > 0:
        raise ValueError(f"--failure-hours must be positive, not {hours}")
    return planner.checkpoint_plan(
        best, failures_per_device_hour=1 / hours, storage_Bps=options.storage
    )


def _checkpoint_text(plan: CheckpointPlan) -> str:
    return (
        f"checkpoints: {plan.checkpoint_bytes / 1e9:.4g} GB in {plan.checkpoint_s:.3g} s; a "
        f"failure every {plan.failure_s / 3600:.3g} h; best interval {plan.interval_s / 60:.3g} "
        f"min, {plan.steps} steps; goodput {plan.goodput:.1%}"
    )


def _training(options: PlanOptions, best: Prediction, goodput: float) -> tuple[str, dict[str, Any]]:
    assert options.tokens is not None
    run = planner.training_run(
        best,
        tokens=options.tokens,
        price_per_hour=options.price,
        watts=options.watts,
        goodput=goodput,
    )
    parts = [
        f"training on {run.tokens:.4g} tokens: {run.steps} steps, {run.days:.4g} days "
        f"({run.low_s / 86400:.4g} to {run.high_s / 86400:.4g})",
        f"{run.device_hours:.4g} device hours",
    ]
    if run.energy_kWh is not None:
        parts.append(f"{run.energy_kWh / 1000:.4g} MWh at most")
    if run.cost is not None:
        parts.append(f"cost {run.cost:,.0f}")
    return "; ".join(parts), asdict(run)


def _sensitivity(inputs: PlanInputs, best: Prediction) -> tuple[Table, list[dict[str, Any]]]:
    rows = planner.sensitivity(
        inputs.model, best.cluster, best.layout, inputs.job, calibration=inputs.calibration
    )
    table = Table(title="sensitivity of the best layout", title_justify="left")
    for name in ("property", "1 % better saves", "twice as good saves", "step"):
        table.add_column(name, justify="left" if name == "property" else "right")
    for row in rows:
        table.add_row(
            row.name, f"{row.elasticity:.2f} %", f"{row.saved:.1%}", f"{row.improved_s:.4g} s"
        )
    return table, [asdict(row) for row in rows]

"""Tables and JSON of recommendation models: the placements of a search, or one placement."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from unisono.commands.planning.layout_tables import PlanOutput, common_document
from unisono.commands.planning.plan_inputs import read_cluster
from unisono.commands.planning.plan_options import PlanOptions
from unisono.planner import Calibration, Layout, Workload, recommendation
from unisono.planner.recommendation import DlrmPrediction

_REFUSED = ("pareto", "scaling", "sensitivity", "checkpoints", "tokens", "plot_path")


def dlrm_output(options: PlanOptions) -> PlanOutput:
    """Returns the output of a search, or of one layout. Raises ValueError for options that a
    recommendation model does not have.
    """
    for name in _REFUSED:
        if getattr(options, name):
            option = "plot" if name == "plot_path" else name
            raise ValueError(f"--{option} is for transformers, not for recommendation models")
    usual_values = {
        "schedules": "1f1b",
        "price": None,
        "trainable": "all",
        "document": None,
        "padding": 0.0,
        "offload": False,
        "context_kind": "ring",
        "headroom": 0.1,
    }
    for name, usual in usual_values.items():
        if getattr(options, name) != usual:
            option = name.removesuffix("_kind")
            raise ValueError(f"--{option} is for transformers, not for recommendation models")
    predictions = _predictions(options)
    best = predictions[0]
    title = (
        f"{options.model} on {options.cluster}, {options.batch} samples, "
        f"{best.model.parameters / 1e9:.3g} billion parameters"
    )
    parts: list[Any] = [_table(predictions, title), _placement_table(best)]
    if options.explain:
        parts.append(str(best.explain()))
    written: list[Path] = []
    if options.save_path is not None:
        best.layout.save(options.save_path)
        written.append(options.save_path)
    document = {"layouts": [_document(each) for each in predictions]}
    return PlanOutput(parts=parts, document=document, written=written)


def _predictions(options: PlanOptions) -> tuple[DlrmPrediction, ...]:
    assert options.model and options.cluster and options.batch is not None
    model = recommendation.load_dlrm(options.model)
    cluster = read_cluster(options.cluster, options.topology)
    job = Workload(
        seq=1 if options.seq is None else options.seq,
        global_batch=options.batch,
        micro_batch=options.micro_batch,
        precision=options.precision,
        recompute=options.recompute,
        software=options.software,
    )
    calibration = Calibration.load(options.calibration) if options.calibration else None
    if options.layout is not None or options.placement is not None:
        layout = Layout.read(options.layout or f"dp={cluster.devices}")
        found = recommendation.predict(
            model,
            cluster,
            layout,
            job,
            placement=options.placement or "auto",
            table_update=options.table_update,
            calibration=calibration,
        )
        return (found,)
    return recommendation.search(
        model,
        cluster,
        job,
        objective=options.objective,
        longest_s=options.longest_s,
        keep=options.keep,
        table_update=options.table_update,
        calibration=calibration,
    )


def _table(predictions: tuple[DlrmPrediction, ...], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    left = ("layout", "placement")
    for name in (*left, "micro", "step", "80 % interval", "memory", "MFU", "samples/s"):
        table.add_column(name, justify="left" if name in left else "right")
    for each in predictions:
        fits = "" if each.fits else f", {each.capacity_bytes / 1e9:.1f} fit"
        table.add_row(
            each.layout.text(),
            each.placed_by,
            str(each.job.micro_batch),
            f"{each.step_s:.4g} s",
            f"{each.low_s:.4g} to {each.high_s:.4g} s",
            f"{each.memory_bytes / 1e9:.1f} GB{fits}",
            f"{each.mfu:.1%}",
            f"{each.samples_per_s:.4g}",
        )
    return table


def _placement_table(prediction: DlrmPrediction) -> Table:
    table = Table(title=f"tables of the placement {prediction.placed_by}", title_justify="left")
    for name in ("table", "rows", "ids", "kind", "ranks"):
        table.add_column(name, justify="left" if name in ("kind", "ranks") else "right")
    for number, each in enumerate(prediction.placement.tables):
        whole = len(each.ranks) == prediction.placement.ranks
        ranks = "all" if whole else " ".join(map(str, each.ranks))
        table.add_row(str(number), f"{each.shape.rows:,}", str(each.shape.ids), each.kind, ranks)
    return table


def _document(prediction: DlrmPrediction) -> dict[str, Any]:
    """Returns a prediction as JSON."""
    return {
        **common_document(prediction),
        "placed_by": prediction.placed_by,
        "tables": [asdict(each) for each in prediction.placement.tables],
        "memory_bytes_by_kind_and_device": dict(prediction.memory),
        "samples_per_s": prediction.samples_per_s,
    }

"""The training of one layout on one rank."""

from __future__ import annotations

import resource
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from unisono.parallel import DLRM, ParallelRun, RunReport
from unisono.train import events
from unisono.train.layout_forecast import divided, forecast
from unisono.train.layout_settings import LayoutRun
from unisono.train.layout_tasks import build_task
from unisono.train.training_loop import Emit

_KIBIBYTE = 1024


def train_layout(run: LayoutRun, emit: Emit) -> None:
    """Trains a task with a layout, and emits the result as an event. Collective.

    Raises `ValueError` if the layout cannot divide the task.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, run.dtype))
    task = build_task(run)
    predicted = forecast(run, task) if run.predicts else {}
    parameters = sum(each.numel() for each in task.model.parameters())
    trained = divided(run, task)
    first = 0
    if run.load is not None:
        trained.load(Path(run.load))
        first = trained.steps
    emit(events.Started(total_steps=run.steps, parameters=parameters))
    losses, norms = [], []
    for step in range(first, first + run.steps):
        losses.append(float(trained.step(*task.batch(run, step))))
        norms.append(trained.gradient_norm)
        emit(events.Stepped(backend="unisono", step=step - first + 1, loss=losses[-1]))
    if run.save is not None:
        trained.save(Path(run.save))
    result = {"parameters": parameters, "losses": losses, "grad_norms": norms}
    emit(events.LayoutFinished(result=result | _figures(run, trained, predicted)))


def _figures(run: LayoutRun, trained: ParallelRun, predicted: dict[str, Any]) -> dict[str, Any]:
    report: RunReport = trained.report()
    unit = "tokens" if report.tokens > run.batch else "samples"
    peaks: list[Any] = [None] * dist.get_world_size()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIBIBYTE
    dist.all_gather_object(peaks, peak)
    return {
        **_tables(trained),
        **_passes(run, trained),
        **_schedule(run, trained),
        "bytes_sent": _lists(report.bytes_sent),
        "memory": _lists(report.memory),
        "bubble": report.bubble,
        "exposed_s": report.exposed_s,
        "hidden_s": report.hidden_s,
        "placement": report.placement,
        "step_s": report.step_s,
        f"{unit}_per_s": report.tokens / report.step_s,
        "peak_bytes": peaks,
        "layout": asdict(run.layout),
        "predicted": {
            "bytes_sent": _lists(report.predicted.bytes_sent),
            "memory": _lists(report.predicted.memory),
            "bubble": report.predicted.bubble,
            **predicted,
        },
    }


def _passes(run: LayoutRun, trained: ParallelRun) -> dict[str, Any]:
    """Returns the passes of the last step if `tells_passes` is True, else an empty dict."""
    if not run.tells_passes:
        return {}
    return {"passes": {name: each.spans for name, each in trained.passes().items()}}


def _schedule(run: LayoutRun, trained: ParallelRun) -> dict[str, Any]:
    """Returns the pipeline schedule if `tells_schedule` is True, else an empty dict."""
    return {"schedule": trained.pipeline_schedule().to_document()} if run.tells_schedule else {}


def _tables(trained: ParallelRun) -> dict[str, Any]:
    """Returns the ranks and loads of embedding tables; an empty dict if none are placed."""
    model = trained.stages[0][1]
    if not isinstance(model, DLRM) or model.placement is None:
        return {}
    tables = [
        asdict(table.shape) | {"kind": table.kind, "ranks": list(table.ranks)}
        for table in model.placement.tables
    ]
    return {"tables": tables, "table_loads": list(model.tables.loads())}


def _lists(figures: Any) -> dict[str, list[float]]:
    return {name: list(row) for name, row in figures.items()}

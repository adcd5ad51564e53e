"""The forecast of a step of a layout's run, from models with one and with two layers."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from unisono.parallel import ParallelRun, forecast_step, parallelize
from unisono.planner import Layout
from unisono.train.layout_settings import SHAPES, LayoutRun
from unisono.train.layout_tasks import LayoutTaskParts, build_task


def forecast(run: LayoutRun, parts: LayoutTaskParts) -> dict[str, Any]:
    """Returns the forecast time of a step and its parts, in seconds. Collective.

    `parts`: the task of `run`; its model stays unchanged. Raises `ValueError` for a task without
    repeated layers.
    """
    if run.task not in SHAPES:
        raise ValueError(
            f"--predict: expected a model of equal layers (text, moe, long), got {run.task}"
        )
    shape = run.shape or SHAPES[run.task]

    def build(layers: int, layout: Layout, microbatches: int) -> ParallelRun:
        small = replace(
            run, shape=replace(shape, layers=layers), layout=layout, microbatches=microbatches
        )
        return divided(small, build_task(small))

    inputs, targets = parts.batch(run, 0)
    found = forecast_step(
        build,
        run.layout,
        layers=shape.layers,
        microbatches=run.microbatches,
        inputs=inputs,
        targets=targets,
    )
    return {"step_s": found.step_s, "step_parts": asdict(found)}


def divided(run: LayoutRun, parts: LayoutTaskParts) -> ParallelRun:
    """Returns the training run of a task's model, divided by the layout of `run`. Collective."""
    return parallelize(
        parts.model,
        run.layout,
        loss=parts.loss,
        optimizer=parts.optimizer,
        microbatches=run.microbatches,
        clip=run.clip,
    )

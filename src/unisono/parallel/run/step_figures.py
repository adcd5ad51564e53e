"""The figures of a run's last step: bytes, memory and times, predicted and measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from unisono.parallel.run.batch_parts import BatchPart
from unisono.parallel.run.measured_schedule import measured_schedule
from unisono.parallel.run.parameter_sets import HeldParameter, ParameterSet
from unisono.parallel.run.pipeline_runner import PipelineRunner
from unisono.parallel.run.predicted_traffic import MicrobatchSize, StepSize, predicted_bytes
from unisono.parallel.run.run_report import (
    RunReport,
    make_report,
    memory_by_kind,
    predicted_memory,
)
from unisono.parallel.run.schedule_tasks import run_equal_passes, run_like
from unisono.parallel.run.stage_clock import StageClock
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import PipelineSchedule, TaskGroup, TaskRun


class StepFigures:
    """Gathers the figures of all ranks. All methods are collective."""

    def __init__(
        self,
        stages: Sequence[tuple[int, nn.Module]],
        sets: Sequence[ParameterSet],
        frozen: Sequence[HeldParameter],
        mesh: TrainingMesh,
        *,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Sequence[str]],
        clock: StageClock,
        pipeline: PipelineRunner | None,
    ) -> None:
        """`groups`: the parameters of each group of the optimizer."""
        self._stages, self._sets, self._frozen, self._mesh = stages, sets, frozen, mesh
        self._optimizer, self._groups = optimizer, groups
        self._clock, self._pipeline = clock, pipeline

    def report(
        self, part: BatchPart, *, steps: int, step_s: list[float], sent: Mapping[str, int]
    ) -> RunReport:
        """Returns the figures of a step on this rank's part of a batch.

        `steps`: the number of steps so far, and `step_s` the seconds of each. `sent`: the bytes
        that this rank sent in the step, by group.
        """
        mesh = self._mesh
        tasks = self._pipeline.tasks() if self._pipeline is not None else []
        figures = {
            "pipeline": mesh.ranks("pp"),
            "steps": steps,
            "step_s": step_s,
            "busy_s": self._clock.busy_s,
            "span": self._clock.span,
            "bytes_sent": sent,
            "memory": memory_by_kind(self._sets, self._frozen, self._optimizer),
            "predicted_bubble": run_equal_passes(tasks).bubble if tasks else 0.0,
            "predicted_bytes": predicted_bytes(self._stages, self._sets, mesh, self._size(part)),
            "predicted_memory": predicted_memory(
                self._sets, self._frozen, mesh, self._optimizer, self._groups
            ),
        }
        return make_report(mesh.layout, mesh.of_all_ranks(figures))

    def _size(self, part: BatchPart) -> StepSize:
        held = [*self._frozen, *(each for found in self._sets for each in found.held)]
        return StepSize(
            microbatches=tuple(
                MicrobatchSize(tokens=len(x) * math.prod(y.shape[1:]), samples=len(x))
                for x, y in zip(part.inputs, part.targets, strict=True)
            ),
            item_bytes=(held[0].values if held else torch.empty(0)).element_size(),
            parts=part.microbatches(),
            regathers=self._pipeline.regathers() if self._pipeline else {},
        )

    def passes(self) -> dict[str, TaskRun]:
        """Returns the passes of rank 0's pipeline, measured and predicted."""
        found = self._mesh.of_all_ranks(self._clock.spans)
        rows = [found[rank] for rank in self._mesh.grid.group(0, "pp")]
        tasks: list[list[TaskGroup]] = [[(span.task,) for span in row] for row in rows]
        if self._pipeline is not None:
            tasks = self._pipeline.tasks()
        predicted = run_like(tasks, [span for row in rows for span in row])
        return {"predicted": predicted, "measured": TaskRun(spans=tuple(map(tuple, rows)))}

    def pipeline_schedule(self) -> PipelineSchedule:
        """Returns the schedule of rank 0's pipeline with measured times and messages.

        Raises `ValueError` without a pipeline.
        """
        if self._pipeline is None:
            raise ValueError("pipeline_schedule: expected a layout with pp > 1, got pp = 1")
        found = self._mesh.of_all_ranks((self._clock.spans, self._clock.result_bytes))
        ranks = [found[rank] for rank in self._mesh.grid.group(0, "pp")]
        return measured_schedule(
            self._mesh.layout.schedule,
            self._pipeline.tasks(),
            [span for spans, _ in ranks for span in spans],
            {stage: sizes for _, results in ranks for stage, sizes in results.items()},
        )

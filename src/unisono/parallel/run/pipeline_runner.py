"""Pipelines on torch's schedules: each rank runs its stages on all microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import distributed as dist
from torch import nn

from unisono.parallel.run.batch_parts import BatchPart
from unisono.parallel.run.measured_schedule import MessageBytes
from unisono.parallel.run.model_stages import stage_count
from unisono.parallel.run.run_stage import RunStage, StagePasses
from unisono.parallel.run.torch_schedules import (
    check_microbatches,
    is_single,
    pipeline_tasks,
    schedule_class,
)
from unisono.parallel.run.traced_stages import TracedStage
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import TaskGroup

_PartLoss = Callable[[Any, torch.Tensor], torch.Tensor]


class PipelineRunner:
    """Runs forward and backward passes of a batch through the stages of this rank's pipeline."""

    def __init__(
        self,
        stages: Sequence[tuple[int, nn.Module]],
        mesh: TrainingMesh,
        *,
        microbatches: int,
        loss: _PartLoss,
        passes: StagePasses,
    ) -> None:
        """`stages`: number and modules of each stage of this rank.

        Raises `ValueError` if the schedule needs another number of microbatches.
        """
        check_microbatches(mesh.layout, microbatches)
        self._mesh, self._loss, self._passes = mesh, loss, passes
        self._microbatches = microbatches
        self._traced = [each for _, each in stages if isinstance(each, TracedStage)]
        self._targets: Sequence[torch.Tensor] = ()
        count, group = stage_count(mesh.layout), cast(dist.ProcessGroup, mesh.group("pp"))
        self._stages = [
            RunStage(module, number, count, group, microbatches=microbatches, passes=passes)
            for number, module in stages
        ]
        self._schedule = self._make_schedule()
        for each in self._stages:
            each.connect()

    def check(self, inputs: torch.Tensor) -> None:
        """Raises `ValueError` for inputs of a microbatch that a traced stage does not take."""
        for stage in self._traced:
            stage.check(inputs)

    def run(self, part: BatchPart | None) -> list[torch.Tensor]:
        """Accumulates the gradients of a batch; returns its losses on the rank of the last stage.

        Other ranks return no losses. `part`: None if this rank has failed before its passes.
        """
        self._passes.clock.restart()
        self._targets = () if part is None else part.targets
        for stage in self._stages:
            stage.inputs = () if part is None else part.inputs
        losses: list[torch.Tensor] = []
        ends = self._stages[-1].is_last or self._stages[0].is_last
        # torch divides these numbers, and so gives each microbatch its own
        numbers = torch.arange(self._microbatches) if ends else None
        try:
            self._schedule.step(
                target=numbers, losses=losses if ends else None, return_outputs=False
            )
        finally:
            for stage in self._stages:
                stage.inputs = ()
                stage.clear_runtime_states()
            self._targets = ()
        return losses

    def _loss_of(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        """Returns the loss of a microbatch; zero after a failure."""
        if not self._passes.failure.is_found:
            try:
                return self._loss(output, self._targets[int(number)])
            except Exception as error:
                self._passes.failure.note(error)
        return torch.zeros(())

    def tasks(self) -> list[list[TaskGroup]]:
        """Returns the forward and backward passes of each rank of the pipeline, in order."""
        return pipeline_tasks(self._mesh.layout, self._microbatches)

    def result_bytes(self) -> dict[int, MessageBytes]:
        """Returns the sizes of the last step's results, by stage of this rank."""
        return {
            each.stage_index: (each.last_form.result_bytes, each.last_form.gradient_bytes)
            for each in self._stages
            if each.last_form is not None
        }

    def regathers(self) -> dict[int, int]:
        """Returns, for each stage of this rank, how often torch gathers its split weights again.

        Torch keeps the gathered weights of three stages of a rank, and drops those of other stages
        until a pass needs them.
        """
        if is_single(self._mesh.layout):
            return {}
        order = self._schedule.pipeline_order_with_comms[self._mesh.coordinates["pp"]]
        counts = Counter(
            each.stage_index for each in order if each.computation_type.value == "UNSHARD"
        )
        return {stage: count - 1 for stage, count in counts.items()}

    def _make_schedule(self) -> Any:
        layout = self._mesh.layout
        return schedule_class(layout)(
            self._stages[0] if is_single(layout) else self._stages,
            self._microbatches,
            loss_fn=self._loss_of,
            scale_grads=False,
        )

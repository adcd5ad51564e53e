"""Pipelines on torch's schedules: each rank runs its stages on all microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import distributed as dist
from torch import nn

from unisono.parallel.run.batch.batch_parts import BatchPart, Microbatch
from unisono.parallel.run.batch.model_call import ModelCall
from unisono.parallel.run.pipeline.model_stages import stage_count
from unisono.parallel.run.pipeline.run_stage import RunStage, StagePasses
from unisono.parallel.run.pipeline.schedules import (
    MessageBytes,
    is_single,
    schedule_class,
)
from unisono.parallel.run.pipeline.stage_messages import begin
from unisono.parallel.training_mesh import TrainingMesh
from unisono.torch_backend import skip_message_setup

_PartLoss = Callable[[Any, Microbatch], torch.Tensor]


class PipelineRunner:
    """Runs forward and backward passes of a batch through the stages of this rank's pipeline."""

    def __init__(
        self,
        stages: Sequence[tuple[int, nn.Module]],
        mesh: TrainingMesh,
        *,
        microbatches: int,
        call: ModelCall,
        loss: _PartLoss,
        passes: StagePasses,
    ) -> None:
        """`stages`: number and modules of each stage of this rank. `call`: that of the model."""
        self._mesh, self._loss, self._passes = mesh, loss, passes
        self._count = microbatches
        self._microbatches: Sequence[Microbatch] = ()
        count, group = stage_count(mesh.layout), cast(dist.ProcessGroup, mesh.group("pp"))
        self._stages = [
            RunStage(
                module,
                number,
                count,
                group,
                microbatches=microbatches,
                passes=passes,
                call=call,
            )
            for number, module in stages
        ]
        self._schedule = self._make_schedule()
        for each in self._stages:
            each.connect()

    def check(self, part: BatchPart) -> None:
        """Raises `ValueError` for a microbatch that a traced stage does not take."""
        for stage in self._stages:
            stage.submod.check(part.microbatches[0].inputs)

    def run(self, part: BatchPart | None) -> list[torch.Tensor]:
        """Accumulates the gradients of a batch; returns its losses on the rank of the last stage.

        Other ranks return no losses. `part`: None if this rank has failed before its passes.
        """
        self._begin(part)
        losses: list[torch.Tensor] = []
        ends = self._stages[-1].is_last or self._stages[0].is_last
        # torch divides these numbers, and so gives each microbatch its own
        numbers = torch.arange(self._count) if ends else None
        try:
            self._schedule.step(
                target=numbers, losses=losses if ends else None, return_outputs=False
            )
        finally:
            self._end()
        return losses

    def evaluate(self, part: BatchPart | None) -> list[torch.Tensor]:
        """Runs the forward passes of a batch; returns what `run` does. Call without gradients.

        Each rank runs all microbatches through its first stage, then through its next one.
        """
        before = [(each.submod, each.last_form) for each in self._stages]
        self._begin(part)
        losses: list[torch.Tensor] = []
        sent: list[Any] = []
        try:
            self._leave_out_dropout()
            for stage in self._stages:
                for number in range(self._count):
                    for work in [begin(each) for each in stage.get_fwd_recv_ops(number)]:
                        work.wait()
                    output = stage.forward_one_chunk(number)
                    if stage.is_last:
                        losses.append(self._loss_of(output, torch.tensor(number)))
                        continue
                    for each in self._stages:
                        if each.stage_index == stage.stage_index + 1:
                            each.set_local_fwd_input(output, number)
                    sent += [begin(each) for each in stage.get_fwd_send_ops(number)]
            for work in sent:
                work.wait()
        finally:
            self._end()
            for stage, kept in zip(self._stages, before, strict=True):
                stage.submod, stage.last_form = kept
        return losses

    def _leave_out_dropout(self) -> None:
        """Puts traced stages into eval mode; other modules are in it already."""
        try:
            for stage in self._stages:
                stage.submod = stage.submod.in_eval_mode()
        except ValueError as error:
            self._passes.errors.fail(error)

    def _begin(self, part: BatchPart | None) -> None:
        self._passes.clock.restart()
        self._microbatches = () if part is None else part.microbatches
        for stage in self._stages:
            stage.inputs = [each.inputs for each in self._microbatches]

    def _end(self) -> None:
        for stage in self._stages:
            stage.inputs = ()
            stage.clear_runtime_states()
        self._microbatches = ()

    def _loss_of(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        """Returns the loss of a microbatch; zero after a failure."""
        if not self._passes.errors.is_failed:
            try:
                last = next(each for each in self._stages if each.is_last)
                found = last.submod.model_output(output)
                return self._loss(found, self._microbatches[int(number)])
            except Exception as error:
                self._passes.errors.fail(error)
        return torch.zeros(())

    def result_bytes(self) -> dict[int, MessageBytes]:
        """Returns the sizes of the last step's results, by stage of this rank."""
        forms = {each.stage_index: each.last_form for each in self._stages}
        return {number: form.nbytes for number, form in forms.items() if form is not None}

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
        schedule = schedule_class(layout)(
            self._stages[0] if is_single(layout) else self._stages,
            self._count,
            loss_fn=self._loss_of,
            scale_grads=False,
        )
        skip_message_setup(schedule)  # not all ranks may make a schedule at the same step
        return schedule

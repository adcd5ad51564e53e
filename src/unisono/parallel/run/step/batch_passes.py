"""The forward and backward passes of a batch on this rank, in a pipeline or without one."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch

from unisono.parallel.precision import ComputedWeights
from unisono.parallel.run.batch.batch_parts import BatchPart, Microbatch
from unisono.parallel.run.batch.batch_tree import replace_leaves
from unisono.parallel.run.batch.model_call import ModelCall
from unisono.parallel.run.divided_model import DividedModel
from unisono.parallel.run.loss.batch_loss import BatchLoss
from unisono.parallel.run.parameters.gradient_sums import GradientSums
from unisono.parallel.run.pipeline.pipeline_runner import PipelineRunner
from unisono.parallel.run.pipeline.run_stage import StagePasses
from unisono.parallel.run.pipeline.schedules import check_microbatches, pipeline_tasks
from unisono.parallel.run.step.pass_context import PassContext
from unisono.parallel.run.step.step_checks import StepChecks
from unisono.parallel.run.step.step_errors import StepErrors
from unisono.pipeline import TaskGroup


class BatchPasses:
    """Runs the microbatches of a step through the stages of this rank."""

    def __init__(
        self,
        model: DividedModel,
        *,
        call: ModelCall,
        loss: BatchLoss,
        context: PassContext,
        checks: StepChecks,
        errors: StepErrors,
        sums: GradientSums,
        microbatches: int,
    ) -> None:
        """`call`: how the model is called. `sums`: those of gradients.

        Raises `ValueError` if the schedule of a pipeline needs another number of microbatches.
        """
        self._model, self._mesh, self._call = model, model.mesh, call
        self._loss, self._context, self._checks = loss, context, checks
        self._errors, self._precision, self._last_pass = errors, model.precision, sums.last_pass
        self._weights = ComputedWeights(model.modules, model.precision)
        self._scale = 1.0
        self.clock = sums.clock
        self._runners: dict[int, PipelineRunner] = {}
        self.microbatches = microbatches
        """Number of microbatches of the last batch."""
        self.divide(microbatches)

    @property
    def pipeline(self) -> PipelineRunner | None:
        """The pipeline of the current number of microbatches; None without a pipeline."""
        return self._runners.get(self.microbatches)

    def tasks(self) -> list[list[TaskGroup]]:
        """Returns the passes of each rank of a pipeline, in order; empty without a pipeline."""
        layout = self._mesh.layout
        return pipeline_tasks(layout, self.microbatches) if layout.pp > 1 else []

    def divide(self, microbatches: int) -> None:
        """Sets the number of microbatches of the next batches.

        Raises `ValueError` if the schedule of the pipeline needs another number.
        """
        check_microbatches(self._mesh.layout, microbatches)
        if self._mesh.layout.pp > 1 and microbatches not in self._runners:
            passes = StagePasses(
                clock=self.clock, errors=self._errors, context=self._context, last=self._last_pass
            )
            self._runners[microbatches] = PipelineRunner(
                self._model.stages,
                self._mesh,
                microbatches=microbatches,
                call=self._call,
                loss=self._part_loss,
                passes=passes,
            )
        self.microbatches = microbatches

    def begin(self, part: BatchPart, step: int, scale: float) -> None:
        """Prepares the modules for a batch; `step`: the number of steps before. `scale`: factor of
        the losses that `train` returns."""
        self._scale = scale
        if self.pipeline is not None:
            self.pipeline.check(part)
        self._context.begin(step, part, scale)
        self._mesh.sequence = part.sequence

    def train(self, part: BatchPart | None) -> list[torch.Tensor]:
        """Accumulates the gradients of a batch; returns its losses, of the ranks that have some.

        `part`: None if this rank has failed before its passes.
        """
        losses: list[torch.Tensor] = []
        # a failed rank keeps to the messages
        with self._checks.passes(), torch.enable_grad(), self._weights.passing():
            if self.pipeline is not None:  # it sends its messages in any case
                losses = self.pipeline.run(part)
            elif part is not None:
                try:
                    losses = self._each(part, self._train_one)
                except Exception as error:
                    self._errors.fail(error)
        if self._weights.are_changed:
            self._errors.note_fault(
                "a forward pass changed a parameter in place, as embeddings with max_norm do, but "
                f"passes use copies in {self._precision.computation_type}; change parameters "
                "between steps; precision = None works"
            )
        return losses

    def evaluate(self, part: BatchPart | None) -> list[torch.Tensor]:
        """Returns the losses of a batch, of the ranks that have some, without gradients."""
        with torch.no_grad(), self._weights.passing():
            if self.pipeline is not None:
                return self.pipeline.evaluate(part)
            try:
                return [] if part is None else self._each(part, self._evaluate_one)
            except Exception as error:
                self._errors.fail(error)
        return []

    def _each(self, part: BatchPart, one: Any) -> list[torch.Tensor]:
        """Runs all microbatches without a pipeline; returns their losses."""
        self.clock.restart()
        return [one(number, each) for number, each in enumerate(part.microbatches)]

    def _train_one(self, number: int, each: Microbatch) -> torch.Tensor:
        begin_s = time.monotonic()
        loss = self._evaluate_one(number, each)
        self.clock.record("F", number, 0, begin_s)
        begin_s = time.monotonic()
        is_last = number == self.microbatches - 1
        with self._context.backward(number), self._last_pass(0) if is_last else nullcontext():
            torch.autograd.backward(loss)
        self.clock.record("B", number, 0, begin_s)
        return loss

    def _evaluate_one(self, number: int, each: Microbatch) -> torch.Tensor:
        ((_, model),) = self._model.stages
        with self._context.forward(number):
            output = self._call(model, each.inputs)
        return self._part_loss(output, each)

    def _part_loss(self, output: Any, part: Microbatch) -> torch.Tensor:
        """Returns what this output adds to the loss of the whole batch, scaled."""
        self._call.check_output(output, part.passed)
        output = self._converted(output)
        with self._context.autocast.forward():
            loss = self._loss.part(output, part)
        if self._loss.error is None:  # else the loss only keeps all outputs in the graph
            self._checks.check_loss(loss, output, part.targets)
        if self._precision.is_narrow:  # a sum of parts needs more bits than a part
            loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
        return loss if self._scale == 1 else loss * self._scale

    def _converted(self, output: Any) -> Any:
        """Returns an output in the type that the loss receives. A loss that the model has computed
        itself needs no other output."""
        dtype = self._precision.output_type
        if dtype is None or self._loss.is_of_model:
            return output

        def converted(_: str, leaf: Any) -> Any:
            is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            return leaf.to(dtype) if is_float else leaf

        return replace_leaves(output, converted)

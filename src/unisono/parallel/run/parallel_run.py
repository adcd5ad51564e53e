"""A training run of a model that is divided by a layout: steps, checkpoints and reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.parallel.precision import LossScaler
from unisono.parallel.run.batch.batch_parts import BatchPart, data_parallel_rank
from unisono.parallel.run.batch.model_call import ModelCall
from unisono.parallel.run.batch.step_batches import NO_TARGETS, StepBatches
from unisono.parallel.run.divided_model import DividedModel
from unisono.parallel.run.figures.run_report import RunReport
from unisono.parallel.run.figures.step_figures import StepFigures
from unisono.parallel.run.files.run_checkpoints import RunCheckpoints
from unisono.parallel.run.files.run_files import RunFiles
from unisono.parallel.run.files.run_weights import RunWeights
from unisono.parallel.run.loss.batch_loss import BatchLoss, Loss, StatedWeight
from unisono.parallel.run.loss.loss_state import LossState
from unisono.parallel.run.parameters.gradient_hooks import GradientHooks
from unisono.parallel.run.parameters.gradient_sums import GradientSums
from unisono.parallel.run.run_failure import RunEnd
from unisono.parallel.run.step.batch_passes import BatchPasses
from unisono.parallel.run.step.pass_context import PassContext
from unisono.parallel.run.step.step_agreement import StepAgreement
from unisono.parallel.run.step.step_checks import StepChecks
from unisono.parallel.run.step.step_end import StepEnd
from unisono.parallel.run.step.step_errors import StepErrors
from unisono.parallel.run.step.written_buffers import unchanged
from unisono.pipeline import PipelineSchedule, TaskGroup, TaskRun

_AXES = ("pp", "tp", "shard", "dp_replicate")
"""The groups that together have all ranks of a layout."""


class ParallelRun(RunFiles):
    """The training run of a divided model, which `parallelize` returns."""

    def __init__(
        self,
        model: DividedModel,
        *,
        weights: RunWeights,
        hooks: GradientHooks,
        sums: GradientSums,
        loss: Loss,
        weight: StatedWeight | None,
        call: ModelCall,
        microbatches: int,
        clip: float | None,
        is_local: bool,
    ) -> None:
        """`weights`: those of this rank, for exports. `hooks`: those of parameters. `sums`: those
        of gradients. `weight`: that of a part's loss. `call`: how the model is called. `is_local`:
        each rank of `dp` passes its own part of a batch.
        """
        mesh = model.mesh
        self._model, self.mesh, self.sets, self.stages = model, mesh, model.sets, model.stages
        self.microbatches = microbatches
        """Number of microbatches of the next steps."""
        self.clip = clip
        self.gradient_norm = 0.0
        """Norm of all gradients of the last step, before clipping."""
        self.step_s: list[float] = []
        """Seconds of each step."""
        self._scaler, self._hooks, self.clock = LossScaler(model.precision), hooks, sums.clock
        kept, has_cp = LossState(loss, model.modules), mesh.layout.cp > 1
        self._roots = [*model.modules, *(module for _, module in kept.modules)]
        self._loss = BatchLoss(
            loss,
            is_balanced=model.is_balanced,
            cut=1 + has_cp,
            weight=weight,
            stages=[] if has_cp else model.modules,  # with cp, a pass has a watch of its own
        )
        self._context = PassContext(model, call, self._loss, kept.modules)
        self._agreement, self._sums, self._errors = StepAgreement(), sums, StepErrors(model)
        parts = mesh.layout.dp * mesh.layout.cp * mesh.layout.pp * microbatches
        self._checks = StepChecks(model, hooks, self._errors, parts=parts)
        self._batches = StepBatches(mesh, self._agreement, call, self._loss, is_local=is_local)
        self._passes = BatchPasses(
            model,
            call=call,
            loss=self._loss,
            context=self._context,
            checks=self._checks,
            errors=self._errors,
            sums=sums,
            microbatches=microbatches,
        )
        self._ends = StepEnd(
            model,
            self._loss,
            self._agreement,
            self._checks,
            self._context.balanced,
            self._scaler,
        )
        checkpoints = RunCheckpoints(model, kept, self._scaler)
        super().__init__(checkpoints, weights, RunEnd(mesh), loaded=self._checks.note_arrays)
        self._sent_before: dict[str, int] = {}
        self._part: BatchPart | None = None
        self._figures = StepFigures(model, self._passes)
        self._held_bytes = sum(held.values.nbytes for held in model.trained)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers of this rank's parameters, for example for learning rate schedulers."""
        return self._model.optimizers.each

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The only one of `optimizers`. Raises `ValueError` if there are several."""
        one, *more = self.optimizers
        if more:
            raise ValueError(
                f"optimizer: the run has {1 + len(more)} optimizers; run.optimizers has them"
            )
        return one

    @property
    def data_parallel_rank(self) -> int:
        """Number of this rank among those that process different samples, for samplers."""
        return data_parallel_rank(self.mesh)

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that process different samples."""
        return self.mesh.layout.dp

    @property
    def loss_scale(self) -> float:
        """The factor of the next step's losses, which `Precision(computation=torch.float16)`
        chooses; 1 for other precisions."""
        return self._scaler.factor

    @property
    def skipped_steps(self) -> int:
        """Number of steps that changed no weights, because a gradient of float16 overflowed."""
        return self._scaler.skipped

    def step(
        self, inputs: Any, targets: Any = NO_TARGETS, *, microbatches: int | None = None
    ) -> torch.Tensor:
        """Trains on a batch; returns the batch's loss before the step, on all ranks. Collective.

        `step(inputs, targets)` gets two tensors: the loss is `loss(model(inputs), targets)`.
        `step(batch)` gets tensors in mappings, dataclasses, tuples and lists, with the samples in
        their first dimensions, and other values, which every part gets: the model is called as its
        signature says, or by `call`, and the loss is `loss(output, batch)`. `microbatches`: their
        number in this step, if it is another one than that of the run.

        All ranks pass the same whole batch, and each rank trains on its part. With
        `batch="local"`, each rank of `dp` passes a part of its own, and the whole batch is these
        parts, one after the other. The loss equals that of one process with the whole batch, plus
        the balance losses of experts. Under `torch.autocast`, forward passes and the loss use
        autocast. With float16, a step whose gradients overflow changes no weights.

        Raises `ValueError` for sizes that the layout cannot divide, under `torch.no_grad`, and on
        all ranks if they passed different batches or if the loss cannot be computed in parts.
        Raises `PeerLostError` with the number of a rank that died.

        If one rank fails, this rank raises its error, and all others raise an error with the rank
        and the cause: a `ValueError` if it is one there, otherwise a `RuntimeError`. The next step
        works, with unchanged weights:

        - in all layouts, if a rank refuses its batch, or if the loss or a parameter's hook fails;
        - without `tp`, `cp`, `ep`, and ZeRO 2 and 3, also if a module fails in its passes.

        Any other error of one rank, such as that of a module in a layout whose passes have
        collectives, of the optimizer, or a `KeyboardInterrupt`, ends the run: the groups of its
        mesh fail on all ranks with the cause, and later calls of its methods raise it again. Then
        close the mesh, build model and run again, and load a checkpoint. Torch's default group
        still works, unless a rank died.
        """
        return self._guarded(lambda: self._step(inputs, targets, microbatches))

    def evaluate(
        self, inputs: Any, targets: Any = NO_TARGETS, *, microbatches: int | None = None
    ) -> torch.Tensor:
        """Returns the loss of a batch in eval mode, without gradients, on all ranks. Collective.

        The arguments, the loss and the errors are those of `step`. Nothing changes: weights,
        gradients, modes and buffers of the modules, torch's generator, the number of steps and
        the figures of reports.
        """
        return self._guarded(lambda: self._evaluate(inputs, targets, microbatches))

    def _guarded(self, action: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Runs a step; an error that not all ranks have ends the run."""
        self._end.require_usable()
        try:
            with self._context.autocast.enter_step():
                return action()
        except BaseException as last:
            own = self._errors.take()  # a failed rank may fail again at its messages
            if self._agreement.has_raised(last):
                self._checkpoints.asynchronous.note(last)
                raise
            error = self._end.end(own or last, step=self.steps + 1)
            if error is not last:
                raise error from last if error is own else own or last
            raise
        finally:
            self._context.autocast.leave_step()

    def _step(self, inputs: Any, targets: Any, microbatches: int | None) -> torch.Tensor:
        start_s = time.perf_counter()
        part = self._begin(inputs, targets, microbatches, trains=True)
        self._sent_before = self.mesh.bytes_sent()
        total = self.update(self._passes.train(part))
        self._part = part
        self.steps += 1
        self.step_s.append(time.perf_counter() - start_s)
        return total

    def _evaluate(self, inputs: Any, targets: Any, microbatches: int | None) -> torch.Tensor:
        passes, sequence, sent = self._passes, self.mesh.sequence, self.mesh.bytes_sent()
        count = passes.microbatches
        try:
            with self.clock.apart(), unchanged(self._roots, self._model.gathered):
                part = self._begin(inputs, targets, microbatches, trains=False)
                losses = passes.evaluate(part)
                return self._ends.evaluated(losses, self._error())
        finally:
            passes.microbatches, self.mesh.sequence = count, sequence
            for name, now in self.mesh.bytes_sent().items():
                self._sent_before[name] = self._sent_before.get(name, 0) + now - sent.get(name, 0)

    def _begin(
        self, inputs: Any, targets: Any, microbatches: int | None, *, trains: bool
    ) -> BatchPart | None:
        """Divides a batch and prepares its passes; returns None if this rank has failed."""
        count = self.microbatches if microbatches is None else microbatches
        self._errors.restart()
        self._checks.begin()
        self._agreement.begin()
        if trains:
            self._sums.begin()
        part = None
        try:
            part = self._prepared(inputs, targets, count, trains=trains)
        except Exception as error:
            if self._agreement.is_agreed(error):
                raise
            self._errors.fail(error)
        if not self._errors.begin_passes():  # the others would wait in the passes of this rank
            self._agreement.error = self._errors.first
            self._agreement.exchange([self.mesh.group(name) for name in _AXES])
        return part

    def _prepared(self, inputs: Any, targets: Any, count: int, *, trains: bool) -> BatchPart:
        if trains and not torch.is_grad_enabled():
            raise ValueError("step computes gradients: call it outside of torch.no_grad")
        if trains and self.average is not None:
            self.average.require_weights("step")
        self._checkpoints.asynchronous.require_good()
        if count != self._passes.microbatches:
            self._passes.divide(count)
            self._checks.divide(self.mesh.layout.pp * self._parts())
        part = self._batches.divide(inputs, targets, count)
        self._context.autocast.require_one()
        self._passes.begin(part, self.steps, self._scaler.factor if trains else 1.0)
        if trains:
            self.clock.begin_step(self.steps + 1)
            for each in self.sets:
                each.zero_gradients()
        return part

    def update(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sums the gradients of all ranks, clips them, and updates the weights. Collective.

        `losses`: this rank's losses of the microbatches. Returns their sum over all ranks. `step`
        calls this method after the backward passes.
        """
        is_scaled = False
        self._errors.check(self._sums.finish)
        if self._hooks.exist:
            with self._errors.keeping():
                is_failed = self._error() is not None
                is_scaled = self._ends.call_hooks(self._hooks, is_failed=is_failed)
        with self.clock.exchange("loss and norm", 0):
            total, self.gradient_norm = self._ends.trained(
                losses, self._error(), clip=self.clip, is_scaled=is_scaled
            )
        begin_ns = time.monotonic_ns()
        if self._scaler.accepts(self.gradient_norm):
            self._model.optimizers.step()
        self.clock.optimizer(begin_ns)
        with self.clock.exchange("parameters", self._held_bytes):
            for each in self.sets:
                each.gather()
        self._sums.learn()
        return total

    def report(self) -> RunReport:
        """Returns the figures of the last step, predicted and measured. Collective.

        Raises `ValueError` before the first step.
        """
        self._require_step("report")
        assert self._part is not None
        sent = self.mesh.bytes_sent()
        since = {name: sent[name] - self._sent_before.get(name, 0) for name in sent}
        return self._figures.report(self._part, steps=self.steps, step_s=self.step_s, sent=since)

    def tasks(self) -> list[list[TaskGroup]]:
        """Returns the passes of each rank of a pipeline, in order; empty without a pipeline."""
        return self._passes.tasks()

    def passes(self) -> dict[str, TaskRun]:
        """Returns the forward and backward passes of the last step in rank 0's pipeline, measured
        and predicted: by the schedule with the median times of the measured passes. Collective.

        Raises `ValueError` before the first step.
        """
        self._require_step("passes")
        return self._figures.passes()

    def pipeline_schedule(self) -> PipelineSchedule:
        """Returns the pipeline schedule with the times and messages of the last step, as data.
        Collective.

        `unisono simulate` runs the schedule on any network. The pipeline is that of rank 0. Raises
        `ValueError` before the first step, and without a pipeline.
        """
        self._require_step("pipeline_schedule")
        return self._figures.pipeline_schedule()

    def _require_step(self, what: str) -> None:
        self._end.require_usable()
        if not self.step_s:
            raise ValueError(f"{what}: expected a step before, but none was taken; call step first")

    def _error(self) -> Exception | None:
        """Returns this rank's error, which the exchange of the loss tells all ranks."""
        written = self._context.written.error(parts=self._parts(), stages=self.mesh.layout.pp)
        return self._errors.first or self._loss.error or written

    def _parts(self) -> int:
        """Returns the number of parts in which ranks and microbatches compute a batch."""
        return self.mesh.layout.dp * self.mesh.layout.cp * self._passes.microbatches

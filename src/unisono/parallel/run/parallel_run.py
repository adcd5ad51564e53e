"""A training run of a model that is divided by a layout: steps, checkpoints and reports."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono.parallel.run.batch_loss import BatchLoss, Loss
from unisono.parallel.run.batch_parts import BatchPart, divide_batch
from unisono.parallel.run.gathered_module import CallOrder, GatheredModule
from unisono.parallel.run.loss_state import LossState
from unisono.parallel.run.parameter_sets import HeldParameter, ParameterSet
from unisono.parallel.run.parameter_uses import ParameterUses
from unisono.parallel.run.pass_context import PassContext
from unisono.parallel.run.pipeline_runner import PipelineRunner
from unisono.parallel.run.run_checkpoints import RunCheckpoints
from unisono.parallel.run.run_end import RunEnd
from unisono.parallel.run.run_report import RunReport
from unisono.parallel.run.run_stage import StagePasses
from unisono.parallel.run.run_timeline import RunTimeline
from unisono.parallel.run.run_weights import ModelFiles, RunWeights
from unisono.parallel.run.small_sum import small_sum
from unisono.parallel.run.stage_clock import StageClock
from unisono.parallel.run.step_agreement import StepAgreement
from unisono.parallel.run.step_checks import StepChecks
from unisono.parallel.run.step_failure import StepFailure
from unisono.parallel.run.step_figures import StepFigures
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import PipelineSchedule, TaskGroup, TaskRun
from unisono.torch_backend import default_communicator

_AXES = ("pp", "tp", "shard", "dp_replicate")
"""The groups that together have all ranks of a layout."""
_NORM_EPSILON = 1e-6  # added to the norm, as by torch.nn.utils.clip_grad_norm_


class ParallelRun:
    """The training run of a divided model, which `parallelize` returns."""

    def __init__(
        self,
        stages: Sequence[tuple[int, nn.Module]],
        sets: Sequence[ParameterSet],
        frozen: Sequence[HeldParameter],
        mesh: TrainingMesh,
        *,
        names: Sequence[str],
        groups: Sequence[Sequence[str]],
        gathered: Sequence[GatheredModule],
        calls: CallOrder,
        files: ModelFiles,
        checks: StepChecks,
        loss: Loss,
        is_balanced: bool,
        optimizer: torch.optim.Optimizer,
        microbatches: int,
        clip: float | None,
    ) -> None:
        """`names`: the trained parameters of the whole model. `groups`: those of each group of the
        optimizer. `gathered`: the modules that gather parameters, and `calls` their order.
        `files`: what an export needs to know of the whole model. `checks`: those of a step.
        `is_balanced`: a stage, perhaps of another rank, has balance losses.
        """
        self.mesh, self.sets, self._frozen = mesh, sets, frozen
        self.stages = stages
        """Number and modules of each stage of this rank."""
        self.optimizer = optimizer
        """The optimizer of this rank's parameters, for example for a learning rate scheduler."""
        self.microbatches, self.clip = microbatches, clip
        self.gradient_norm = 0.0
        """Norm of all gradients of the last step, before clipping."""
        self.steps = 0
        """Number of steps so far."""
        self.step_s: list[float] = []
        """Seconds of each step."""
        modules = [stage for _, stage in stages]
        kept = LossState(loss, modules)
        self._context = PassContext(stages, kept.modules, is_pipeline=mesh.layout.pp > 1)
        self._loss = BatchLoss(loss, is_balanced=is_balanced, cut=1 + (mesh.layout.cp > 1))
        self._agreement, self._checks, self._end = StepAgreement(), checks, RunEnd(mesh)
        self._uses = ParameterUses(names, sets, mesh, calls)
        self._checkpoints = RunCheckpoints(sets, frozen, modules, optimizer, groups, mesh, kept)
        self._weights = RunWeights(sets, frozen, modules, mesh, files)
        self._sent_before: dict[str, int] = {}
        self._part: BatchPart | None = None
        self.clock, self._failure = StageClock(), StepFailure(mesh.layout, stages)
        passes = StagePasses(
            clock=self.clock,
            failure=self._failure,
            enter=self._context.forward,
            reenter=self._context.backward,
        )
        self._pipeline = (
            PipelineRunner(
                stages, mesh, microbatches=microbatches, loss=self._part_loss, passes=passes
            )
            if mesh.layout.pp > 1
            else None
        )
        self._figures = StepFigures(
            stages,
            sets,
            frozen,
            mesh,
            optimizer=optimizer,
            groups=groups,
            gathered=gathered,
            clock=self.clock,
            pipeline=self._pipeline,
        )
        comm = default_communicator()
        assert comm is not None, "a mesh needs the backend unisono"
        self._timeline = RunTimeline(comm.timeline)
        self._held_bytes = sum(held.values.nbytes for each in sets for held in each.held)
        self.clock.tell = self._timeline.passed

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Trains on a batch; returns the batch's loss before the step, on all ranks. Collective.

        All ranks pass the same whole batch, and each rank trains on its part. The loss equals
        `loss(model(inputs), targets)` in one process, plus the balance losses of experts. Under
        `torch.autocast`, forward passes and the loss use autocast.

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
        self._end.require_usable()
        try:
            with self._context.autocast.enter_step():
                return self._step(inputs, targets)
        except BaseException as last:
            own = self._failure.take()  # a failed rank may fail again at its messages
            if self._agreement.has_raised(last):
                raise
            error = self._end.end(own or last, step=self.steps + 1)
            if error is not last:
                raise error from last if error is own else own or last
            raise
        finally:
            self._context.autocast.leave_step()

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        start_s = time.perf_counter()
        self._failure.restart()
        self._checks.begin(self.optimizer, self.sets)
        losses: list[torch.Tensor] = []
        part = None
        try:
            self._agreement.begin((inputs, targets))
            part = self._begin_step(inputs, targets)
        except Exception as error:
            self._failure.note(error)
        if not self._failure.begin_passes():  # the others would wait in the passes of this rank
            self._agreement.error = self._checks.faults.error() or self._failure.error
            self._agreement.exchange([self.mesh.group(name) for name in _AXES])
        self._sent_before = self.mesh.bytes_sent()
        with self._checks.passes(), torch.enable_grad():  # a failed rank keeps to the messages
            if self._pipeline is not None:  # it sends its messages in any case
                losses = self._pipeline.run(part)
            elif part is not None:
                try:
                    losses = self._passes(part)
                except Exception as error:
                    self._failure.note(error)
        total = self.update(losses)
        self.steps += 1
        self.step_s.append(time.perf_counter() - start_s)
        return total

    def _begin_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> BatchPart:
        """Divides a batch, and prepares modules and parameters for its passes."""
        if not torch.is_grad_enabled():
            raise ValueError("step computes gradients: call it outside of torch.no_grad")
        part = self._part = divide_batch(inputs, targets, self.mesh, self.microbatches)
        if self._pipeline is not None:
            self._pipeline.check(part.inputs[0])
        self._timeline.step = self.steps + 1
        layout = self.mesh.layout
        self._loss.begin(targets, parts=layout.dp * layout.cp * self.microbatches)
        self._context.begin(self.steps, part, samples=len(inputs))
        self.mesh.sequence = part.inputs[0].shape[1] if inputs.dim() > 1 else 0
        for each in self.sets:
            each.zero_gradients()
        return part

    def update(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sums the gradients of all ranks, clips them, and updates the weights. Collective.

        `losses`: this rank's losses of the microbatches. Returns their sum over all ranks. `step`
        calls this method after the backward passes.
        """
        nbytes, is_scaled = self._held_bytes, False
        with self._timeline.exchange("gradients", nbytes):
            for each in self.sets:
                each.reduce()
        if self._checks.hooks.exist:
            with self._failure.keeping():
                is_scaled = self._call_hooks()
        with self._timeline.exchange("loss and norm", 0):
            total = self._finish(losses, is_scaled)
        begin_ns = time.monotonic_ns()
        self.optimizer.step()
        self._timeline.optimizer(begin_ns)
        with self._timeline.exchange("parameters", nbytes):
            for each in self.sets:
                each.gather()
        return total

    def save(self, folder: Path) -> None:
        """Writes a checkpoint that a run of any layout can load. Collective.

        The checkpoint holds weights, buffers, optimizer states, the hyperparameters of the
        optimizer's groups (such as the learning rate), the buffers that the loss has written and
        the number of steps. An earlier checkpoint in the folder stays readable until the new
        checkpoint is complete. Raises `PeerLostError` with the number of a rank that died.
        """
        self._end.require_usable()
        self._checkpoints.save(Path(folder), self.steps)

    def load(self, folder: Path) -> None:
        """Loads the newest checkpoint of a folder, from any layout of this model. Collective.

        Raises `ValueError` on all ranks if the checkpoint is from another model or kind of
        optimizer, before anything changes, and `PeerLostError` with the number of a rank that died.
        """
        self._end.require_usable()
        self.steps = self._checkpoints.load(Path(folder))
        self._checks.kept.note(self.optimizer)

    def export(self, folder: Path | str) -> None:
        """Writes the whole model's parameters and buffers as files of safetensors, with an index.
        Collective.

        The names are those of the whole model. A parameter with several names is written under the
        first. For a model of transformers, the folder also gets its configuration, so that
        `from_pretrained` loads it. No rank holds all weights. Weights of an earlier export in the
        folder are replaced. Raises `ValueError` on all ranks unless all see the same folder, and
        `ModuleNotFoundError` without the package safetensors.
        """
        self._end.require_usable()
        self._weights.export(Path(folder))

    def load_weights(self, path: Path | str) -> None:
        """Loads parameters and buffers from a file of safetensors, or a folder of such files, under
        the names of the whole model. Collective.

        Each rank reads its part only. Optimizer states and the number of steps stay. Raises
        `ValueError` on all ranks, before anything changes, if names or shapes differ from those of
        the model, and `ModuleNotFoundError` without the package safetensors.
        """
        self._end.require_usable()
        self._weights.load(Path(path))

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
        return self._pipeline.tasks() if self._pipeline is not None else []

    def passes(self) -> dict[str, TaskRun]:
        """Returns the last step's forward and backward passes, measured and predicted. Collective.

        The passes are those of rank 0's pipeline.

        The prediction runs the schedule with the median times of the measured passes. Raises
        `ValueError` before the first step.
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

    def _passes(self, part: BatchPart) -> list[torch.Tensor]:
        """Runs all microbatches forward and backward without a pipeline; returns their losses."""
        self.clock.restart()
        losses = []
        ((_, model),) = self.stages
        for number, (inputs, targets) in enumerate(zip(part.inputs, part.targets, strict=True)):
            begin_s = time.monotonic()
            with self._context.forward(number):
                output = model(inputs)
            loss = self._part_loss(output, targets)
            self.clock.record("F", number, 0, begin_s)
            begin_s = time.monotonic()
            with self._context.backward(number):
                loss.backward()  # type: ignore[no-untyped-call]
            self.clock.record("B", number, 0, begin_s)
            losses.append(loss)
        return losses

    def _part_loss(self, output: Any, targets: torch.Tensor) -> torch.Tensor:
        """Returns what this output adds to the loss of the whole batch."""
        with self._context.autocast.forward():
            loss = self._loss.part(output, targets)
        self._checks.check_loss(loss, output, targets)
        return loss

    def _finish(self, losses: Sequence[torch.Tensor], is_scaled: bool) -> torch.Tensor:
        """Sums the loss and the squared norm over all ranks, clips gradients, returns the loss.

        The same exchange finds ranks that disagree, and the parameters that no rank used; their
        gradients become None. `is_scaled`: the gradients are those of the batch's loss.
        """
        squares = sum(each.squares() for each in self.sets)
        self._agreement.error = self._error()
        own = [self._own_loss(losses), squares, self._own_weight()]
        agreed = self._agreement.counts()
        numbers = [*own, *agreed, *self._uses.counts()]
        total, squares, weight, *counts = small_sum(numbers, self.mesh.all_ranks)
        self._agreement.require(counts[: len(agreed)])
        self._uses.skip_unused(counts[len(agreed) :], self.optimizer)
        self._checks.kept.note(self.optimizer)
        factor = self._loss.factor(weight)
        rest = 1.0 if is_scaled else factor
        self.gradient_norm = math.sqrt(squares) * abs(rest)
        clipping = 1.0 if self.clip is None else self.clip / (self.gradient_norm + _NORM_EPSILON)
        self._multiply(min(clipping, 1) * rest)
        return torch.tensor(self._loss.mean(total, factor), dtype=torch.float64)

    def _call_hooks(self) -> bool:
        """Calls the hooks of parameters; returns True if it has scaled the gradients."""
        is_failed = self._error() is not None
        return self._checks.hooks.call(
            is_failed=is_failed, weight=self._own_weight(), scale=self._scale
        )

    def _scale(self, weight: float) -> None:
        """Makes the gradients those of the batch's loss; `weight`: that of the whole batch."""
        self._multiply(self._loss.factor(weight))

    def _multiply(self, factor: float) -> None:
        if factor != 1:
            for each in self.sets:
                each.scale(factor)

    def _error(self) -> Exception | None:
        """Returns this rank's error, which the exchange of the loss tells all ranks."""
        layout = self.mesh.layout
        parts = layout.dp * layout.cp * self.microbatches
        written = self._context.written.error(parts=parts, stages=layout.pp)
        return self._checks.faults.error() or self._failure.error or self._loss.error or written

    def _adds_losses(self) -> bool:
        """Returns True if this rank adds its losses to the sum over all ranks. Ranks that split the
        logits of the same samples compute equal losses, so only the first of these ranks adds them.
        """
        return self.mesh.coordinates[self.mesh.logit_axis] == 0

    def _own_weight(self) -> float:
        """Returns what this rank adds to the weight of the batch's loss."""
        return self._loss.weight * self._adds_losses()

    def _own_loss(self, losses: Sequence[torch.Tensor]) -> float:
        """Returns what this rank adds to the sum of the loss over all ranks."""
        total = 0.0
        if self._adds_losses():
            total += sum(float(loss.detach()) for loss in losses)
        return total + sum(float(each.auxiliary_loss) for each in self._context.balanced)

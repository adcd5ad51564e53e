"""Pipelines on torch's schedules: each rank runs its stages on all microbatches."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from unisono.parallel.run.model_stages import stage_count
from unisono.parallel.run.stage_clock import StageClock
from unisono.parallel.run.step_autocast import StepAutocast
from unisono.parallel.run.torch_schedules import (
    check_microbatches,
    is_single,
    pipeline_tasks,
    schedule_class,
)
from unisono.parallel.run.traced_stages import TracedStage
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import TaskGroup
from unisono.torch_backend import is_view

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class PipelineRunner:
    """Runs forward and backward passes of a batch through the stages of this rank's pipeline.

    When a batch has a new shape, torch exchanges the shapes of activations: the first step of this
    shape sends more bytes than later steps, and runs each stage one additional time.
    """

    def __init__(
        self,
        stages: Sequence[tuple[int, nn.Module]],
        mesh: TrainingMesh,
        *,
        microbatches: int,
        loss: Loss,
        before_pass: Callable[[int], None],
        autocast: StepAutocast,
        after_trial: Callable[[nn.Module], None],
    ) -> None:
        """`stages`: number and modules of each stage of this rank.

        `before_pass` receives the number of each microbatch before its forward pass. `autocast`: of
        forward passes. `after_trial` receives each stage after torch's additional pass through the
        stage. Raises `ValueError` if the schedule needs another number of microbatches.
        """
        check_microbatches(mesh.layout, microbatches)
        self._stages, self._mesh, self._loss = stages, mesh, loss
        self._microbatches = microbatches
        self._before_pass, self._after_trial = before_pass, after_trial
        self._autocast = autocast
        self._schedules: dict[tuple[object, ...], Any] = {}
        self.clock = StageClock()

    def run(
        self, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Accumulates the gradients of a batch; returns its losses on the rank of the last stage.

        Other ranks return no losses. All microbatches must have one shape.
        """
        for _, stage in self._stages:
            if isinstance(stage, TracedStage):
                stage.check(inputs[0])
        key = (tuple(inputs[0].shape), inputs[0].dtype, self._autocast.dtype)
        schedule = self._schedules.get(key)
        if schedule is None:
            schedule = self._schedules[key] = self._schedule()
        self.clock.restart()
        losses: list[torch.Tensor] = []
        numbers = [number for number, _ in self._stages]
        arguments = [torch.cat(list(inputs))] if 0 in numbers else []
        ends = stage_count(self._mesh.layout) - 1 in numbers
        target = torch.cat(list(targets)) if ends else None
        schedule.step(
            *arguments,
            target=target,
            losses=losses if ends else None,
            return_outputs=False,
        )
        return losses

    def tasks(self) -> list[list[TaskGroup]]:
        """Returns the forward and backward passes of each rank of the pipeline, in order."""
        return pipeline_tasks(self._mesh.layout, self._microbatches)

    def regathers(self) -> dict[int, int]:
        """Returns, for each stage of this rank, how often torch gathers its split weights again.

        Torch keeps the gathered weights of three stages of a rank, and drops those of other stages
        until a pass needs them.
        """
        if is_single(self._mesh.layout):
            return {}
        order = self._any_schedule().pipeline_order_with_comms[self._mesh.coordinates["pp"]]
        counts = Counter(
            each.stage_index for each in order if each.computation_type.value == "UNSHARD"
        )
        return {stage: count - 1 for stage, count in counts.items()}

    def _any_schedule(self) -> Any:
        schedule = next(iter(self._schedules.values()), None)
        return self._schedule() if schedule is None else schedule

    def _schedule(self) -> Any:
        layout = self._mesh.layout
        stages = [
            _TimedStage(
                module,
                number,
                stage_count(layout),
                torch.device("cpu"),
                group=self._mesh.group("pp"),
                clock=self.clock,
                before_pass=self._before_pass,
                autocast=self._autocast,
                after_trial=self._after_trial,
            )
            for number, module in self._stages
        ]
        kind = schedule_class(layout)
        return kind(
            stages[0] if is_single(layout) else stages,
            self._microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )


class _TimedStage(PipelineStage):
    """A stage that records the times of its passes.

    Calls `after_trial` once, after torch's additional pass that finds the shapes. The results and
    gradients of this pass are contiguous, since torch gives receivers' memory the same strides.
    """

    def __init__(
        self,
        *arguments: Any,
        clock: StageClock,
        before_pass: Callable[[int], None],
        autocast: StepAutocast,
        after_trial: Callable[[nn.Module], None],
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._clock = clock
        self._before_pass, self._after_trial = before_pass, after_trial
        self._autocast = autocast
        self._is_trial = True
        self._receives: dict[tuple[str, int], list[dist.P2POp]] = {}

    # All steps receive a microbatch in the same memory, so they can use the same operations. Torch
    # makes new ones in each step, which takes 2 % of the time of a small step.
    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        key = "F", fwd_chunk_id
        if key not in self._receives:
            self._receives[key] = super().get_fwd_recv_ops(fwd_chunk_id)
        return self._receives[key]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        key = "B", bwd_chunk_id
        if key not in self._receives:
            self._receives[key] = super().get_bwd_recv_ops(bwd_chunk_id)
        return self._receives[key]

    def _compute_outputs(self, *arguments: Any, **options: Any) -> Any:
        with self._autocast.forward():
            found = super()._compute_outputs(*arguments, **options)
        return self._for_next_stage(found)

    def _compute_input_grads(self, *arguments: Any, **options: Any) -> Any:
        return tuple(map(_contiguous, super()._compute_input_grads(*arguments, **options)))

    def forward_maybe_with_nosync(self, *arguments: Any, **options: Any) -> Any:
        forward: Any = super().forward_maybe_with_nosync  # torch gives it no types
        return self._for_next_stage(forward(*arguments, **options))

    def _for_next_stage(self, found: Any) -> Any:
        if self.is_last:
            return found
        if isinstance(found, (tuple, list)):
            return tuple(map(_as_message, found))
        return _as_message(found)

    def forward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        self._before_pass(arguments[0])  # the first argument is the microbatch's number
        if self._is_trial:
            self._is_trial = False
            self._after_trial(self.submod)
        begin_s = time.monotonic()
        with self._autocast.forward():
            found = super().forward_one_chunk(*arguments, **options)
        self._clock.record("F", arguments[0], self.stage_index, begin_s)
        if arguments[0] == 0:  # the results of all microbatches have one size
            results = found if isinstance(found, tuple) else (found,)
            self._clock.result_bytes[self.stage_index] = (
                sum(each.nbytes for each in results),
                sum(each.nbytes for each in results if each.requires_grad),
            )
        return found

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        kind = "B" if options.get("full_backward", True) else "I"
        begin_s = time.monotonic()
        found = super().backward_one_chunk(*arguments, **options)
        self._clock.record(kind, arguments[0], self.stage_index, begin_s)
        return found

    def backward_weight_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        begin_s = time.monotonic()
        found = super().backward_weight_one_chunk(*arguments, **options)
        self._clock.record("W", arguments[0], self.stage_index, begin_s)
        return found


def _as_message(result: Any) -> Any:
    """Returns a result of a stage as a contiguous tensor that is not a view.

    Schedules that split the backward pass detach results in place, which views do not permit.
    """
    found = _contiguous(result)
    if isinstance(found, torch.Tensor) and is_view(found):
        return torch.ops.aten._unsafe_view(found, found.shape)  # copies nothing
    return found


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value

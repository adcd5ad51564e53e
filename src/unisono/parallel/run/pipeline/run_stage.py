"""A pipeline stage of a training run: its passes, and its messages for torch's schedules."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from unisono.parallel.run.batch.batch_tree import copied
from unisono.parallel.run.batch.model_call import ModelCall
from unisono.parallel.run.pipeline.split_backward import add_parameter_gradients, without_inputs
from unisono.parallel.run.pipeline.stage_messages import Boundary, ResultReceiver, ResultSender
from unisono.parallel.run.pipeline.stage_result import ResultForm, put_together, take_apart
from unisono.parallel.run.step.pass_context import PassContext
from unisono.parallel.run.step.run_clock import RunClock
from unisono.parallel.run.step.step_errors import StepErrors
from unisono.torch_backend import pipeline_stage_base, version_of, without_view

_REENTRANT = "use_reentrant=True"  # in torch's error about a backward pass in two parts


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePasses:
    """The objects that the stages of a rank share with the run."""

    clock: RunClock
    errors: StepErrors
    context: PassContext
    last: Callable[[int], AbstractContextManager[None]]
    """Makes the context of the last backward pass of a stage in a step."""


@dataclass(slots=True)
class _Passes:
    """A microbatch between its forward and its backward pass."""

    leaves: list[torch.Tensor]
    """The inputs of the stage, as leaves of its autograd graph."""
    results: list[torch.Tensor]
    gradients: Sequence[torch.Tensor | None] | None = None
    """The gradients of the results, if the next stage is on this rank."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The parameters whose gradients the second part of the backward pass computes, as torch
    groups them."""


_Base: Any = pipeline_stage_base()


class RunStage(_Base):  # type: ignore[misc]
    """A stage that learns the form of its inputs from the first microbatch of each step.

    Torch's own stage finds the forms by an additional pass on memory without values, which changes
    whatever the forward pass changes. If a pass fails, this stage keeps to the schedule's messages
    without computing, until the end of the step.
    """

    def __init__(
        self,
        module: nn.Module,
        number: int,
        count: int,
        group: dist.ProcessGroup,
        *,
        microbatches: int,
        passes: StagePasses,
        call: ModelCall,
    ) -> None:
        """`number`: that of the stage, of `count` stages. `group`: the ranks of the pipeline."""
        super().__init__(module, number, count, torch.device("cpu"), group)
        self.args_recv_info = {0: ()}  # torch looks here for connections that skip stages
        self.inputs: Sequence[Any] = ()
        """The inputs of each microbatch of the step, for stages that call a model with them."""
        self._shared, self._microbatches, self._model_call = passes, microbatches, call
        self._under_way: dict[int, _Passes] = {}
        self._local: dict[int, tuple[list[torch.Tensor], ResultForm]] = {}
        self._input_gradients: dict[int, Sequence[torch.Tensor | None] | None] = {}
        self._form: ResultForm | None = None
        self.last_form: ResultForm | None = None
        """The form of the results of the last step; None before that."""
        self._before: ResultReceiver | None = None
        self._after: ResultSender | None = None
        self._changes_inputs = True

    def connect(self) -> None:
        """Prepares the messages to stages of other ranks. Call after torch has placed all stages on
        ranks."""
        number = self.stage_index
        if not self.is_first and not self._is_here(number - 1):
            self._before = ResultReceiver(self._boundary(number - 1, number - 1))
        if not self.is_last and not self._is_here(number + 1):
            self._after = ResultSender(self._boundary(number, number + 1))

    def _is_here(self, stage: int) -> bool:
        return bool(self.stage_index_to_group_rank[stage] == self.group_rank)

    def _boundary(self, stage: int, other: int) -> Boundary:
        peer = self.stage_index_to_group_rank[other]
        return Boundary(stage=stage, peer=peer, group=self.group, microbatches=self._microbatches)

    def clear_runtime_states(self) -> None:
        """Begins a step."""
        self._under_way.clear()
        self._local.clear()
        self._input_gradients.clear()
        self._form = None
        for each in (self._before, self._after):
            if each is not None:
                each.restart()

    # ---- forward pass

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> Any:
        """Runs the forward pass of a microbatch.

        Returns the result of the last stage; the tensors and the form of the result of another
        stage; None after a failure.
        """
        arrived = self._arrived(fwd_chunk_id)
        begin_s = time.monotonic()
        found = None
        if arrived is None:
            self._shared.errors.is_failed = True
        if not self._shared.errors.is_failed:
            assert arrived is not None
            try:
                with self._shared.context.forward(fwd_chunk_id):
                    found = self._forward(fwd_chunk_id, *arrived)
            except Exception as error:
                self._shared.errors.fail(error)
        self._shared.clock.record("F", fwd_chunk_id, self.stage_index, begin_s)
        return found

    def _arrived(self, microbatch: int) -> tuple[list[torch.Tensor], ResultForm | None] | None:
        """Returns the inputs of a microbatch and their form; None if a stage before has failed."""
        if self.is_first:
            return [], None
        if self._before is None:
            return self._local.pop(microbatch, None)
        received = self._before.tensors(microbatch)
        return None if received is None else (received, self._before.form)

    def _forward(
        self, microbatch: int, arrived: list[torch.Tensor], form: ResultForm | None
    ) -> Any:
        # since torch 2.15, `perform_reduce_grad` expects this of split modules
        finalize_later = getattr(self.submod, "set_manual_backward_finalization", None)
        if finalize_later is not None:
            finalize_later(True)
        if form is None:
            leaves: list[torch.Tensor] = []
            result = self.submod.begin(self._model_call, copied(self.inputs[microbatch]))
        else:
            pairs = zip(arrived, form.tensors, strict=True)
            leaves = [x.detach().requires_grad_(each.needs_gradient) for x, each in pairs]
            result = self._call(microbatch, leaves, form)
        if self.is_last:
            self._under_way[microbatch] = _Passes(leaves, [])
            return result
        results, own_form = take_apart(result, self.stage_index)
        if self._form is None:
            # the form of an earlier step has its digest already
            self._form = self.last_form if own_form == self.last_form else own_form
            self.last_form = self._form
        elif own_form != self._form:
            raise ValueError(
                f"stage {self.stage_index} of the pipeline: expected results of one form in all "
                f"microbatches of a step, got {self._form.describe()} and then "
                f"{own_form.describe()}; return equal shapes, or use pp = 1"
            )
        self._under_way[microbatch] = _Passes(leaves, results)
        return results, own_form

    def _call(self, microbatch: int, leaves: Sequence[torch.Tensor], form: ResultForm) -> Any:
        """Runs the stage on leaves of its graph. Modules may change their inputs in place, which
        torch does not permit for leaves."""
        if self._before is None and self._changes_inputs:  # the memory belongs to the stage before
            values = [each.clone() for each in leaves]
        else:
            values = [without_view(x) if x.requires_grad else x for x in leaves]
        before = [version_of(each) for each in values]
        arrived = put_together(form, values)
        result = self.submod.resume(self._model_call, arrived, self.inputs[microbatch])
        if self._before is None:
            is_changed = [version_of(each) for each in values] != before
            if is_changed and not self._changes_inputs:
                raise ValueError(
                    f"stage {self.stage_index} of the pipeline changes its input in place in some "
                    "microbatches only; let it change a copy"
                )
            self._changes_inputs = is_changed
        return result

    # ---- backward pass

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Runs the backward pass of a microbatch, or its first part: the gradients of inputs."""
        begin_s = time.monotonic()
        passes = self._under_way.get(bwd_chunk_id)
        gradients = self._computed(
            bwd_chunk_id,
            passes,
            last_backward,
            lambda passes: self._backward(bwd_chunk_id, passes, loss, full_backward),
        )
        if full_backward:
            self._under_way.pop(bwd_chunk_id, None)
        self._input_gradients[bwd_chunk_id] = gradients
        kind = "B" if full_backward else "I"
        self._shared.clock.record(kind, bwd_chunk_id, self.stage_index, begin_s)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Runs the second part of a backward pass: the gradients of parameters."""
        begin_s = time.monotonic()
        passes = self._under_way.pop(bwd_chunk_id, None)
        self._computed(bwd_chunk_id, passes, last_backward, self._backward_weights)
        self._shared.clock.record("W", bwd_chunk_id, self.stage_index, begin_s)

    def _computed(
        self,
        microbatch: int,
        passes: _Passes | None,
        is_last: bool,
        compute: Callable[[_Passes], Any],
    ) -> Any:
        """Returns what a backward pass computes; None after a failure."""
        if passes is None or self._shared.errors.is_failed:
            return None
        last = self._shared.last(self.stage_index) if is_last else nullcontext()
        try:
            with self._shared.context.backward(microbatch), last:
                return compute(passes)
        except Exception as error:
            self._fail(error)
        return None

    def _fail(self, error: Exception) -> None:
        cause = error.__cause__  # torch wraps an error in its description of all tensors
        found = cause if isinstance(cause, Exception) else error
        if _REENTRANT in str(found):
            found = ValueError(
                "the pipeline's schedule computes the gradients of inputs and of parameters one "
                "after the other, which torch.utils.checkpoint(use_reentrant=True) does not "
                "permit; use_reentrant=False or schedule = 1f1b works"
            )
        self._shared.errors.fail(found)

    def _backward(
        self, microbatch: int, passes: _Passes, loss: torch.Tensor | None, is_whole: bool
    ) -> Sequence[torch.Tensor | None]:
        """Returns the gradients of the stage's inputs."""
        if self.is_last:
            assert loss is not None
            passes.results, passes.gradients = [loss], [None]
        elif self._after is not None:
            passes.gradients = self._after.gradients(microbatch)
        if is_whole:
            return self._whole(passes)
        if not any(each.requires_grad for each in passes.leaves):
            return [None] * len(passes.leaves)  # the second part then is the whole pass
        return self._backward_inputs(passes)

    def _backward_inputs(self, passes: _Passes) -> Sequence[torch.Tensor | None]:
        results, gradients = passes.results, passes.gradients
        assert gradients is not None
        left = without_inputs(results, passes.leaves)
        rest = [place for place in range(len(results)) if place not in left]
        found: Sequence[torch.Tensor | None] = [None] * len(passes.leaves)
        if rest:
            arguments = {
                # torch detaches these in place, and a graph may need its own results
                "stage_output": [without_view(results[place]) for place in rest],
                "output_grads": None if self.is_last else [gradients[place] for place in rest],
                "input_values": passes.leaves,
            }
            found, passes.groups = self.backward_maybe_with_nosync("input", arguments)
        if left:
            torch.autograd.backward(
                [results[place] for place in left],
                [gradients[place] for place in left],
                retain_graph=True,
            )
        return list(found)

    def _backward_weights(self, passes: _Passes) -> None:
        if any(each.requires_grad for each in passes.leaves):
            add_parameter_gradients(passes.groups)
        else:
            self._whole(passes)

    def _whole(self, passes: _Passes) -> Sequence[torch.Tensor | None]:
        if not any(each.requires_grad for each in passes.results):
            return [None] * len(passes.leaves)  # all parameters before the loss are frozen
        arguments = {
            "stage_output": passes.results,
            "output_grads": passes.gradients,
            "input_values": passes.leaves,
        }
        found, _ = self.backward_maybe_with_nosync("full", arguments)
        return list(found)

    # ---- messages

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns the operations that receive the inputs of a microbatch."""
        return [] if self._before is None else self._before.receives(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns the operations that send the results of a microbatch."""
        if self._after is None:
            return []
        passes = self._under_way.get(fwd_chunk_id)
        results = None if passes is None else passes.results
        return self._after.sends(fwd_chunk_id, results, self._form)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns the operations that receive the gradients of a microbatch's results."""
        return [] if self._after is None else self._after.receives(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns the operations that send the gradients of a microbatch's inputs."""
        gradients = self._input_gradients.pop(bwd_chunk_id, None)
        return [] if self._before is None else self._before.sends(bwd_chunk_id, gradients)

    # In the schedules in the form of a V, two adjacent stages are on one rank.

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Takes the results of the stage before, which is on this rank."""
        if prev_stage_outputs is not None:
            self._local[mb_index] = prev_stage_outputs

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Returns the gradients of the inputs for the stage before, which is on this rank."""
        return self._input_gradients.pop(mb_index, None)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Takes the gradients of the results from the next stage, which is on this rank."""
        passes = self._under_way.get(mb_index)
        if passes is not None and next_stage_bwd_outputs is not None:
            pairs = zip(passes.results, next_stage_bwd_outputs, strict=True)
            passes.gradients = [
                torch.zeros_like(result) if gradient is None and result.requires_grad else gradient
                for result, gradient in pairs
            ]

    # ---- torch's preparation of a stage, which this stage does not need

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> None:
        return None

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> None:
        return None

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[()]:
        return ()

"""Records of a model's forward, backward and optimizer phases in the rank's timeline."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from unisono.timeline import BACKWARD, FORWARD, OPTIMIZER, EventKind, TimelineWriter
from unisono.torch_backend import run_after_backward

# Plain numbers: to read an enumeration's value takes half as long as to record an event.
_BEGUN, _ENDED = int(EventKind.BEGUN), int(EventKind.ENDED)


class TrainingPhases:
    """Records the beginning and end of a model's phases, with the step, in the timeline.

    A step begins with the first forward pass after an optimizer step. As long as no optimizer has
    taken a step, it begins with the first forward pass after a backward pass. The owner calls
    `begin_forward` and `end_forward`. Torch hooks record the rest: a hook of the output marks the
    beginning of the backward pass, and hooks of all optimizers mark the steps of optimizers that
    have this model's parameters.
    """

    def __init__(self, timeline: TimelineWriter, parameters: Iterable[nn.Parameter]) -> None:
        self._record = timeline.record
        self._parameters = frozenset(id(each) for each in parameters)
        self._step = 0
        self._last = ""
        self._has_optimizer = False
        self._in_backward = False
        own = weakref.ref(self)

        # Torch calls these hooks for all optimizers and never drops them, so use a weak reference.
        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (found := own()) is not None:
                found._mark_optimizer(optimizer, _BEGUN)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (found := own()) is not None:
                found._mark_optimizer(optimizer, _ENDED)

        self._hooks = ExitStack()
        for hook in (
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
        ):
            self._hooks.callback(hook.remove)
        self._finalizer = weakref.finalize(self, self._hooks.close)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin_forward(self) -> None:
        """Marks the beginning of a forward pass. Passes without gradients are not recorded."""
        if not torch.is_grad_enabled():
            return
        self._in_backward = False  # may still be True, if the last backward pass raised
        boundary = OPTIMIZER if self._has_optimizer else BACKWARD
        if self._last in (boundary, ""):
            self._step += 1
        self._last = FORWARD
        self._record(_BEGUN, FORWARD, self._step)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end_forward(self, output: Any) -> None:
        """Marks the end of the forward pass that returned `output`."""
        if self._last != FORWARD or not torch.is_grad_enabled():
            return
        self._record(_ENDED, FORWARD, self._step)
        tensor = _with_gradient(output)
        if tensor is not None:
            register: Any = tensor.register_hook
            register(self._begin_backward)

    def close(self) -> None:
        """Removes the hooks."""
        self._finalizer()

    def _begin_backward(self, _grad: torch.Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._last = BACKWARD
            self._record(_BEGUN, BACKWARD, self._step)
            run_after_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._record(_ENDED, BACKWARD, self._step)

    def _mark_optimizer(self, optimizer: torch.optim.Optimizer, kind: int) -> None:
        groups = (group["params"] for group in optimizer.param_groups)
        if any(id(params[0]) in self._parameters for params in groups if params):
            self._has_optimizer = True
            self._last = OPTIMIZER
            self._in_backward = False
            self._record(kind, OPTIMIZER, self._step)


def _with_gradient(output: Any) -> torch.Tensor | None:
    """Returns the first tensor of a model's output that requires a gradient."""
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad else None
    parts: Iterable[Any] = ()
    if isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, (list, tuple)):
        parts = output
    return next((found for part in parts if (found := _with_gradient(part)) is not None), None)

"""Backward passes, and the hooks of parameters for their gradients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_execution_engine: Any = torch.autograd.Variable._execution_engine


def run_after_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` at the end of the backward pass under way, before `backward` returns."""
    _execution_engine.queue_callback(callback)


def is_in_backward() -> bool:
    """Returns True if autograd runs a backward pass in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def saved_by(node: Any, name: str, default: Any = None) -> Any:
    """Returns a value that an operation has saved for its backward pass, such as "training";
    `default` if it has saved none of this name.
    """
    return getattr(node, f"_saved_{name}", default)


def gradient_hooks(parameter: Any) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Returns the hooks of `register_hook` and of `register_post_accumulate_grad_hook`."""
    return parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}


def gradient_hook_counts(parameters: Sequence[Any]) -> list[int]:
    """Returns the number of hooks of each parameter for its gradient."""
    return [
        len(each._backward_hooks or ()) + len(each._post_accumulate_grad_hooks or ())
        for each in parameters
    ]


def remove_gradient_hooks(parameter: Any) -> None:
    """Makes backward passes call no hooks of a parameter. The mappings of hooks stay as they are,
    and so do the handles that remove a hook from them.
    """
    parameter._backward_hooks = None
    # torch goes on calling the former hooks after None
    parameter._post_accumulate_grad_hooks = OrderedDict()

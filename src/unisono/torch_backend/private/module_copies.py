"""Copies of modules that share their parts."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from typing import Any, Final

import torch

_PARTS: Final = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


def shell(module: Any) -> Any:
    """Returns a copy of a module that shares everything with it, and may get other children,
    tensors and hooks."""
    found = copy.copy(module)
    for name in (*_PARTS, *_hooks_of(module)):
        vars(found)[name] = copy.copy(vars(module)[name])
    return found


def share_parts(module: Any, other: Any) -> None:
    """Gives a module the children and tensors of another, and those that the other gets later."""
    for name in _PARTS:
        vars(module)[name] = vars(other)[name]


def forget_hooks(module: Any) -> None:
    """Removes the hooks of a module, without its children."""
    for name in _hooks_of(module):
        vars(module)[name] = OrderedDict()


def empty_tensors(module: Any) -> None:
    """Makes the parameters of a module, without its children, NaN that needs no memory, and hides
    them and its buffers from `named_parameters` and `named_buffers`."""
    for name, parameter in module._parameters.items():
        vars(module)[name] = None if parameter is None else _without_memory(parameter)
    vars(module).update(module._buffers)
    module._parameters, module._buffers = {}, {}


def _hooks_of(module: Any) -> list[str]:
    """Returns the names of the attributes that hold a module's hooks."""
    return [
        name for name, each in vars(module).items() if "hooks" in name and isinstance(each, dict)
    ]


def _without_memory(parameter: torch.Tensor) -> torch.Tensor:
    is_float = parameter.is_floating_point() or parameter.is_complex()
    value = torch.tensor(math.nan if is_float else 0, dtype=parameter.dtype)
    return value.expand(parameter.shape)

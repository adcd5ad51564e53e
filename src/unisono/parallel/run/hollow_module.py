"""Modules without memory for their weights, which still compute results of the right shape."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict

import torch
from torch import nn

_PARTS = ("_modules", "_parameters", "_buffers")


def hollow(module: nn.Module) -> nn.Module:
    """Returns a copy of a module whose parameters are NaN and need no memory.

    Its results are NaN where they depend on a parameter. The copy has no hooks, and neither
    parameters nor buffers for `named_parameters` and `named_buffers`.

    >>> x = hollow(nn.Linear(2, 3))(torch.ones(4, 2))
    >>> x.shape, bool(x.isnan().all())
    (torch.Size([4, 3]), True)
    """
    found = shell(module)
    for name, each in module.named_children():
        found._modules[name] = hollow(each)
    empty_tensors(found)
    for name in _hooks_of(found):
        vars(found)[name] = OrderedDict()
    return found


def shell(module: nn.Module) -> nn.Module:
    """Returns a copy of a module that shares everything with it, and may get other children,
    tensors and hooks."""
    found = copy.copy(module)
    for name in (*_PARTS, *_hooks_of(module)):
        vars(found)[name] = copy.copy(vars(module)[name])
    return found


def empty_tensors(module: nn.Module) -> None:
    """Makes the parameters of a module, without its children, NaN, and hides them and its
    buffers."""
    for name, parameter in vars(module)["_parameters"].items():
        vars(module)[name] = None if parameter is None else _without_memory(parameter)
    for name, buffer in vars(module)["_buffers"].items():
        vars(module)[name] = buffer
    vars(module)["_parameters"], vars(module)["_buffers"] = {}, {}


def _hooks_of(module: nn.Module) -> list[str]:
    """Returns the names of the attributes that hold a module's hooks."""
    return [
        name for name, each in vars(module).items() if "hooks" in name and isinstance(each, dict)
    ]


def _without_memory(parameter: torch.Tensor) -> torch.Tensor:
    is_float = parameter.is_floating_point() or parameter.is_complex()
    value = torch.tensor(math.nan if is_float else 0, dtype=parameter.dtype)
    return value.expand(parameter.shape)

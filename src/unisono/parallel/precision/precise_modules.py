"""Modules prepared for a precision: the types of their parameters and of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unisono.parallel.precision.precision import Precision
from unisono.torch_backend import map_tensors, own_parameters

_KEPT = ("label", "target")
"""Words in the names of arguments that a model compares its output with, which stay as they are."""


def convert_parameters(model: nn.Module, precision: Precision) -> None:
    """Converts the parameters of a model to the type in which the run keeps them."""
    dtype = precision.parameters
    for name, each in model.named_parameters():
        if dtype is not None and each.is_floating_point() and each.dtype != dtype:
            each.grad = None
            each.data = each.data.to(dtype)
        if precision.scales_losses and each.dtype == torch.float16:
            raise ValueError(
                f"precision: {name} is kept in float16, whose gradients cannot be unscaled; "
                "expected parameters = torch.float32"
            )


def cast_inputs(model: nn.Module, precision: Precision) -> None:
    """Makes the modules that own parameters convert their floating-point inputs to the type of
    computation, so that inputs and weights have one type.

    An RMS norm without an epsilon keeps the one of its parameter's type: that of bfloat16 is larger
    than the squares of many activations.
    """
    dtype = precision.computation_type
    for module in dict.fromkeys(model.modules()) if dtype is not None else ():
        own = [each for each in module.parameters(recurse=False) if each.is_floating_point()]
        if not own:
            continue
        if isinstance(module, nn.RMSNorm) and module.eps is None:
            module.eps = torch.finfo(own[0].dtype).eps
        assert dtype is not None
        module.register_forward_pre_hook(_conversion(dtype), with_kwargs=True)


def _conversion(dtype: torch.dtype) -> Callable[..., Any]:
    """Returns a forward pre-hook that converts the floating-point arguments of a module, while the
    module has its weights in the type of computation. A program may call it between steps, without.
    """

    def converted(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != dtype else x

    def convert(
        module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        own = own_parameters(module).values()
        if not any(each is not None and each.dtype == dtype for each in own):
            return None
        return tuple(_map(converted, each) for each in arguments), {
            name: each if any(word in name for word in _KEPT) else _map(converted, each)
            for name, each in keywords.items()
        }

    return convert


def _map(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    return map_tensors(function, value) if isinstance(value, tuple | list | dict) else value

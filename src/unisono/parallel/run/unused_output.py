"""A loss of zero that keeps a model's output in the autograd graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def unused(output: Any) -> torch.Tensor:
    """Returns zero, whose gradients for all tensors of an output are zeros.

    So the backward pass runs, with its collectives, whatever the output's values. A product of the
    output with 0 would be NaN for infinite values, and a sum of float16 may be infinite.

    >>> x = torch.tensor([torch.inf], requires_grad=True)
    >>> unused({"logits": (x * 1, None)}).backward()
    >>> x.grad
    tensor([0.])
    """
    found = [each for each in tensors_in(output) if each.requires_grad]
    if not found:
        return torch.zeros((), requires_grad=True)
    zero: torch.Tensor = _Zero.apply(*found)  # type: ignore[no-untyped-call]
    return zero


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


class _Zero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(each.shape, each.dtype) for each in tensors]
        return torch.zeros((), dtype=torch.promote_types(tensors[0].dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in ctx.shapes)

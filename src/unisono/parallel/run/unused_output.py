"""A loss of zero that keeps a model's output in the autograd graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


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
    """Yields the tensors in nested tuples, lists, mappings, dataclasses, and attributes of other
    objects, each once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, _PLAIN) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
        else:
            waiting += reversed(list(_values_in(each)))


def _values_in(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (tuple, list)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    if isinstance(value, (type, nn.Module)) or callable(value):
        return ()
    return getattr(value, "__dict__", {}).values()


class _Zero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(each.shape, each.dtype) for each in tensors]
        return torch.zeros((), dtype=torch.promote_types(tensors[0].dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in ctx.shapes)

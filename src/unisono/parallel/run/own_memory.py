"""Buffers whose elements share memory, as after `expand`, which no rank can receive."""

from __future__ import annotations

import torch
from torch import nn

from unisono.torch_backend import own_buffers


def own_memory(model: nn.Module) -> None:
    """Gives each element of a model's buffers memory of its own. The values stay the same."""
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in own_buffers(module).items():
            if buffer is not None and _shares_memory(buffer):
                own_buffers(module)[name] = copies.setdefault(buffer, buffer.contiguous())


def _shares_memory(x: torch.Tensor) -> bool:
    strides = zip(x.shape, x.stride(), strict=True) if x.layout == torch.strided else ()
    return any(size > 1 and stride == 0 for size, stride in strides)

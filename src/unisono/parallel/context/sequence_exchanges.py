"""All-to-all and all-gather of parts of sequences, with their gradients.

Each exchange is a separate autograd node without parameters. Pipeline schedules that split the
backward pass would run the backward of a node with parameters twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from unisono.torch_backend import all_gather_single, reduce_scatter_single


def all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sends `parts[i]` to rank i; returns the parts from all ranks, in rank order.

    The backward pass sends the gradients back by the same exchange.
    """
    found: torch.Tensor = _AllToAll.apply(parts, group)  # type: ignore[no-untyped-call]
    return found


def all_gather(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the parts of all ranks, in a new first dimension.

    The gradient of a part is the sum of all ranks' gradients of this part.
    """
    found: torch.Tensor = _AllGather.apply(part, group)  # type: ignore[no-untyped-call]
    return found


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        whole = part.new_empty(dist.get_world_size(group), *part.shape)
        all_gather_single(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = gradients[0].contiguous()
        part = torch.empty_like(whole[0])
        reduce_scatter_single(part, whole, group=ctx.group)
        return part, None


def _exchanged(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received

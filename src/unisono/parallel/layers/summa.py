"""SUMMA: the product of two matrices whose blocks are spread over a plane of ranks.

van de Geijn and Watts, "SUMMA: scalable universal matrix multiplication algorithm", 1997. The rank
in row i and column j holds block (i, j) of each matrix. A step broadcasts one column of blocks
along the rows, or one row of blocks along the columns; meanwhile the ranks multiply the blocks of
the previous step.

In the autograd graph, one node exchanges for the gradient of the input, and another node for the
gradient of the weight. Pipeline schedules that split the backward pass run a node twice if both an
input and a weight precede it, and a custom node always computes all its gradients. So the node that
both precede, `_Product`, exchanges nothing in its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist

from unisono.division import part_of
from unisono.parallel.divisible.exchanges import Group
from unisono.parallel.layers.autocast_inputs import autocast_input


def summa(
    x: torch.Tensor, weight: torch.Tensor, row: Group, column: Group, *, width: int
) -> torch.Tensor:
    """Returns this rank's block of x times the transpose of W.

    `width`: number of inputs (columns) of the whole W.

    The rank is in row i and column j. `x`: (..., inputs of part j). `weight`: (outputs of part j,
    inputs of part i). Result: (..., outputs of part j). `row` and `column` are the groups of this
    rank's row and column, in order. Under autocast, the factors are converted first.
    """
    x, weight = autocast_input(x), autocast_input(weight)
    x_only, weight_only = x.detach(), weight.detach()
    by_x = _applied(_InputGradient, x, weight_only, row, column, width)
    by_weight = _applied(_WeightGradient, weight, x_only, row, column, width)
    return _applied(_Product, x_only, weight_only, by_x, by_weight, row, column, width)


def _applied(node: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    found: torch.Tensor = node.apply(*arguments)  # type: ignore[no-untyped-call]
    return found


class _Product(torch.autograd.Function):
    """The product. The backward pass sends the gradient to the nodes of `by_x` and `by_weight`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        by_x: torch.Tensor,
        by_weight: torch.Tensor,
        row: dist.ProcessGroup,
        column: dist.ProcessGroup,
        width: int,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = x.new_zeros(*x.shape[:-1], len(weight))
        flat = y.view(len(rows), len(weight))
        inputs, weights = _columns(rows, row, width), _columns(weight, column, width)
        for block, part in zip(inputs, weights, strict=True):
            flat.addmm_(block, part.T)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, gradients[0], gradients[0], None, None, None


class _InputGradient(torch.autograd.Function):
    """A node between x and the product, whose backward pass computes the gradient of x.

    The result is a zero, expanded to the shape of the product. So the node receives the gradient of
    the product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        row: dist.ProcessGroup,
        column: dist.ProcessGroup,
        width: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.row, ctx.column, ctx.width = x.shape, row, column, width
        return x.new_zeros(()).expand(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        gradient = gradients[0].reshape(ctx.shape[:-1].numel(), len(weight))
        weights = _columns(weight, ctx.column, ctx.width)
        by_x = _reduced((gradient @ part for part in weights), ctx.row)
        return by_x.view(ctx.shape), None, None, None, None


class _WeightGradient(torch.autograd.Function):
    """A node between a weight and the product, like `_InputGradient`."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        x: torch.Tensor,
        row: dist.ProcessGroup,
        column: dist.ProcessGroup,
        width: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.outputs, ctx.row, ctx.column, ctx.width = len(weight), row, column, width
        return weight.new_zeros(()).expand(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        gradient = gradients[0].reshape(len(rows), ctx.outputs)
        blocks = _columns(rows, ctx.row, ctx.width)
        by_weight = _reduced((gradient.T @ block for block in blocks), ctx.column)
        return by_weight, None, None, None, None


def _columns(own: torch.Tensor, group: dist.ProcessGroup, width: int) -> Iterator[torch.Tensor]:
    """Yields each rank's block `own`, in rank order.

    A block has the shape (rows, part of `width`). Its rank broadcasts the block; the next broadcast
    runs while the caller uses the block.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)

    def begin(root: int) -> tuple[torch.Tensor, Any]:
        block = own.contiguous()
        if root != rank:
            block = own.new_empty(len(own), part_of(width, root, ranks)[1])
        return block, dist.broadcast(block, group=group, group_src=root, async_op=True)

    block, work = begin(0)
    for root in range(ranks):
        following = begin(root + 1) if root + 1 < ranks else None
        work.wait()
        yield block
        if following is not None:
            block, work = following


def _reduced(partials: Iterator[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """Reduces partial result number r to rank r of the group; returns this rank's sum."""
    rank, kept = dist.get_rank(group), None
    begun: list[tuple[torch.Tensor, Any]] = []
    for root, made in enumerate(partials):
        partial = made.contiguous()
        kept = partial if root == rank else kept
        begun.append((partial, dist.reduce(partial, group=group, group_dst=root, async_op=True)))
    for _, work in begun:
        work.wait()
    assert kept is not None
    return kept

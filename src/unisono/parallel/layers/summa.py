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

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed as dist

from unisono.division import part_of
from unisono.parallel.divisible.exchanges import Group


def summa(
    x: torch.Tensor, weight: torch.Tensor, row: Group, column: Group, *, width: int
) -> torch.Tensor:
    """Returns this rank's block of x times the transpose of W.

    `width`: number of inputs (columns) of the whole W.

    The rank is in row i and column j. `x`: (..., inputs of part j). `weight`: (outputs of part j,
    inputs of part i). Result: (..., outputs of part j). `row` and `column` are the groups of this
    rank's row and column, in order. Under autocast, the factors are converted first.
    """
    x, weight = _autocast(x), _autocast(weight)
    x_only, weight_only, shape = x.detach(), weight.detach(), x.shape
    of_product = (*shape[:-1], len(weight))

    def gradient_of_x(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = gradient.reshape(shape[:-1].numel(), len(weight))
        weights = _columns(weight, column, width)
        return _reduced((rows @ part for part in weights), row).view(shape)

    def gradient_of_weight(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rows = gradient.reshape(shape[:-1].numel(), of_product[-1])
        blocks = _columns(x.reshape(-1, x.shape[-1]), row, width)
        return _reduced((rows.T @ block for block in blocks), column)

    by_x = _applied(_FactorGradient, x, weight_only, of_product, gradient_of_x)
    by_weight = _applied(_FactorGradient, weight, x_only, of_product, gradient_of_weight)
    return _applied(_Product, x_only, weight_only, by_x, by_weight, row, column, width)


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """Returns x in the type in which autocast multiplies matrices; x itself without autocast."""
    if not torch.is_autocast_enabled("cpu") or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype("cpu"))


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


class _FactorGradient(torch.autograd.Function):
    """A node between a factor and the product, whose backward pass computes the factor's gradient.

    The result is a zero, expanded to the shape of the product. So the node receives the gradient of
    the product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        factor: torch.Tensor,
        other: torch.Tensor,
        shape: tuple[int, ...],
        gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.save_for_backward(other)
        ctx.gradient = gradient
        return factor.new_zeros(()).expand(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (other,) = ctx.saved_tensors
        return ctx.gradient(gradients[0], other), None, None, None


def _columns(own: torch.Tensor, group: Group, width: int) -> Iterator[torch.Tensor]:
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


def _reduced(partials: Iterator[torch.Tensor], group: Group) -> torch.Tensor:
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

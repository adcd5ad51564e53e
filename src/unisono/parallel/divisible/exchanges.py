"""The exchanges before and after layers that are split by tensor parallelism, with gradients.

Each function is a separate autograd node without parameters. Pipeline schedules that split the
backward pass would run the backward of a node with parameters twice. Without a group (None) each
function returns its argument. A `TorchFunctionMode` sees most of them as functions of torch: one
that knows more about x than its values, such as the positions of a sequence, knows it of the
result.

Shoeybi et al., "Megatron-LM", 2019 (`copy_to_all`, `sum_of_all`); Korthikanti et al., "Reducing
activation recomputation in large transformer models", 2022 (the exchanges along the sequence).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec

import torch
from torch import distributed as dist
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from unisono.division import part_of
from unisono.torch_backend import all_gather_single, reduce_scatter_single

Group = dist.ProcessGroup | None
_Options = ParamSpec("_Options")
_Exchange = Callable[Concatenate[torch.Tensor, dist.ProcessGroup, _Options], torch.Tensor]
_Function = Callable[Concatenate[torch.Tensor, Group, _Options], torch.Tensor]


def _of_torch(exchange: _Exchange[_Options]) -> _Function[_Options]:
    """Makes an exchange a function of torch, which a `TorchFunctionMode` sees as one call."""

    @functools.wraps(exchange)
    def function(
        x: torch.Tensor, group: Group, /, *args: _Options.args, **options: _Options.kwargs
    ) -> torch.Tensor:
        if group is None:
            return x
        if has_torch_function((x,)):
            found: torch.Tensor = handle_torch_function(function, (x,), x, group, *args, **options)
            return found
        return exchange(x, group, *args, **options)

    return function


@_of_torch
def copy_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns x, which is equal on all ranks. The backward pass sums the gradients of all ranks."""
    return _applied(_CopyToAll, x, group)


@_of_torch
def sum_of_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the sum of x over the ranks. The backward pass returns the gradient unchanged.

    >>> import unisono
    >>> def sums():
    ...     dist.init_process_group("unisono")
    ...     x = torch.ones(2, requires_grad=True)
    ...     own = copy_to_all(x, dist.group.WORLD) * (1 + dist.get_rank())
    ...     whole = sum_of_all(own, dist.group.WORLD)
    ...     whole.sum().backward()
    ...     return whole.tolist(), x.grad.tolist()
    >>> unisono.run(sums, ranks=2)[0]
    ([3.0, 3.0], [3.0, 3.0])
    """
    return _applied(_SumOfAll, x, group)


@_of_torch
def gather_parts(
    x: torch.Tensor, group: dist.ProcessGroup, *, dim: int, length: int
) -> torch.Tensor:
    """Returns the parts of all ranks, joined along `dim` to `length` elements.

    The gradient of a part is the **sum** of all ranks' gradients of this part. Use this function if
    the ranks compute different results from the whole array.
    """
    return _applied(_GatherParts, x, group, dim, length)


@_of_torch
def sum_to_parts(x: torch.Tensor, group: dist.ProcessGroup, *, dim: int) -> torch.Tensor:
    """Returns this rank's part, along `dim`, of the sum of the ranks' arrays.

    The backward pass joins the gradients of all parts.
    """
    return _applied(_SumToParts, x, group, dim)


@_of_torch
def gather_copies(
    x: torch.Tensor, group: dist.ProcessGroup, *, dim: int, length: int
) -> torch.Tensor:
    """Returns the parts of all ranks, joined along `dim` to `length` elements.

    Use this function if all ranks compute the same results from the whole array. Since the
    gradients of the joined array are equal on all ranks, the backward pass keeps this rank's part
    of its own gradient.
    """
    return _applied(_GatherCopies, x, group, dim, length)


@_of_torch
def keep_part(x: torch.Tensor, group: dist.ProcessGroup, *, dim: int) -> torch.Tensor:
    """Returns this rank's part of x along `dim`, where x is equal on all ranks.

    The backward pass joins the gradients of all parts.

    >>> import unisono
    >>> def parts():
    ...     dist.init_process_group("unisono")
    ...     part = keep_part(torch.arange(3.0), dist.group.WORLD, dim=0)
    ...     whole = gather_copies(part, dist.group.WORLD, dim=0, length=3)
    ...     return part.tolist(), whole.tolist()
    >>> unisono.run(parts, ranks=2)
    [([0.0, 1.0], [0.0, 1.0, 2.0]), ([2.0], [0.0, 1.0, 2.0])]
    """
    return _applied(_KeepPart, x, group, dim)


def swap_blocks(x: torch.Tensor, group: Group, *, peer: int, width: int) -> torch.Tensor:
    """Sends x to the rank `peer` of a group, and returns the array that this rank sends back.

    The last dimensions of the two arrays may differ: the result has `width` elements. The backward
    pass swaps the gradients.
    """
    if group is None or dist.get_rank(group) == peer:
        return x
    return _applied(_SwapBlocks, x, group, peer, width)


def exchange_of(node: object) -> str | None:
    """Returns the name of the function of this file whose backward pass is a node of an autograd
    graph; None for other nodes.
    """
    names = {each.__name__: name for name, each in _NODES.items()}
    return names.get(type(node).__name__.removesuffix("Backward"))


class _CopyToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradients[0], ctx.group), None


class _SumOfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int, length: int
    ) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _gathered(x, group, dim, length)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _scattered_sum(gradients[0], ctx.group, ctx.dim), None, None, None


class _SumToParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.length = group, dim, x.shape[dim]
        return _scattered_sum(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gathered(gradients[0], ctx.group, ctx.dim, ctx.length), None, None


class _GatherCopies(_GatherParts):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _own_part(gradients[0], ctx.group, ctx.dim), None, None, None


class _KeepPart(_SumToParts):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.length = group, dim, x.shape[dim]
        return _own_part(x, group, dim)


class _SwapBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, peer: int, width: int
    ) -> torch.Tensor:
        ctx.group, ctx.peer, ctx.width = group, peer, x.shape[-1]
        return _swapped(x, group, peer, width)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _swapped(gradients[0], ctx.group, ctx.peer, ctx.width), None, None, None


_NODES: Mapping[str, type[torch.autograd.Function]] = MappingProxyType(
    {
        "copy_to_all": _CopyToAll,
        "sum_of_all": _SumOfAll,
        "gather_parts": _GatherParts,
        "sum_to_parts": _SumToParts,
        "gather_copies": _GatherCopies,
        "keep_part": _KeepPart,
        "swap_blocks": _SwapBlocks,
    }
)


def _applied(node: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    found: torch.Tensor = node.apply(*arguments)  # type: ignore[no-untyped-call]
    return found


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    whole = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=group)
    return whole


def _own_part(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    first, count = part_of(x.shape[dim], dist.get_rank(group), dist.get_world_size(group))
    return x.narrow(dim, first, count).contiguous()


def _gathered(x: torch.Tensor, group: dist.ProcessGroup, dim: int, length: int) -> torch.Tensor:
    """Returns all parts joined along `dim`. Pads parts, since all_gather needs equal sizes."""
    ranks = dist.get_world_size(group)
    longest = -(-length // ranks)
    part = _padded(x.movedim(dim, 0), longest)
    whole = part.new_empty(ranks * longest, *part.shape[1:])
    all_gather_single(whole, part, group=group)
    return whole[:length].movedim(0, dim)


def _scattered_sum(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    length = x.shape[dim]
    longest = -(-length // ranks)
    whole = _padded(x.movedim(dim, 0), ranks * longest)
    part = whole.new_empty(longest, *whole.shape[1:])
    reduce_scatter_single(part, whole, group=group)
    _, count = part_of(length, rank, ranks)
    return part[:count].movedim(0, dim).contiguous()


def _swapped(x: torch.Tensor, group: dist.ProcessGroup, peer: int, width: int) -> torch.Tensor:
    found = x.new_empty(*x.shape[:-1], width)
    sent = dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=peer)
    received = dist.P2POp(dist.irecv, found, group=group, group_peer=peer)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
    return found


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    """Returns x as a contiguous array, padded with zeros to `length` rows."""
    missing = length - x.shape[0]
    if missing == 0:
        return x.contiguous()
    return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))

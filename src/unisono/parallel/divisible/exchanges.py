"""The exchanges before and after layers that are split over ranks, with gradients.

Each function is an autograd node without parameters. Pipeline schedules that split the backward
pass would run the backward of a node with parameters twice. Without a group (None) a function
returns its argument. A `TorchFunctionMode` sees most of them as functions of torch: one that knows
more about x than its values, such as the positions of a sequence, knows it of the result.

Shoeybi et al., "Megatron-LM", 2019 (`copy_to_all`, `sum_of_all`); Korthikanti et al., "Reducing
activation recomputation in large transformer models", 2022 (the exchanges along the sequence).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from unisono.division import part_of
from unisono.torch_backend import all_gather_single, reduce_scatter_single, row_exchange_of

Group = dist.ProcessGroup | None
_Pass = tuple[Callable[..., torch.Tensor], *tuple[Any, ...]]
"""A function of an array and the group, with its further arguments."""


class _Exchange(torch.autograd.Function):
    """The node of all exchanges, which differ in their passes."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, name: str, there: _Pass, back: _Pass
    ) -> torch.Tensor:
        ctx.group, ctx.exchange_name, ctx.back = group, name, back
        function, *arguments = there
        return function(x, group, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # torch's check costs microseconds, which passes without a graph of their own do not need
        back = _checked_back if torch.is_grad_enabled() else _back
        return back(ctx, gradients[0]), None, None, None, None


def _back(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    function, *arguments = ctx.back
    found: torch.Tensor = function(gradient, ctx.group, *arguments)
    return found


_checked_back = once_differentiable(_back)
"""Refuses a derivative of the backward pass."""


class TensorSize(NamedTuple):
    """The size of a tensor on this rank."""

    elements: int
    item_bytes: int
    """Bytes of an element."""


def size_on_rank(x: torch.Tensor, is_sent: bool = True) -> TensorSize:
    """Returns the size of a tensor that a rank sends; no elements if it is not sent.

    It is a function of torch, so a mode that reports the shapes of whole sequences leaves it out.
    """
    if has_torch_function((x,)):
        found: TensorSize = handle_torch_function(size_on_rank, (x,), x, is_sent)
        return found
    return TensorSize(x.numel() * is_sent, x.element_size())


def exchange_of(node: object) -> str | None:
    """Returns the name of the function of this file whose backward pass is a node of an autograd
    graph; None for other nodes.
    """
    return getattr(node, "exchange_name", None)


def _exchanged(
    function: Callable[..., torch.Tensor],
    x: torch.Tensor,
    group: Group,
    there: _Pass,
    back: _Pass,
    **options: int,
) -> torch.Tensor:
    """Returns the result of the exchange `function`, whose passes are `there` and `back`.

    A `TorchFunctionMode` sees a call of `function` with these options.
    """
    if group is None:
        return x
    if has_torch_function((x,)):
        seen: torch.Tensor = handle_torch_function(function, (x,), x, group, **options)
        return seen
    name = function.__name__
    found: torch.Tensor = _Exchange.apply(x, group, name, there, back)  # type: ignore[no-untyped-call]
    return found


def copy_to_all(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns x, which is equal on all ranks. The backward pass sums the gradients of all ranks."""
    return _exchanged(copy_to_all, x, group, (_same,), (_summed,))


def sum_of_all(x: torch.Tensor, group: Group) -> torch.Tensor:
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
    return _exchanged(sum_of_all, x, group, (_summed,), (_unchanged,))


def gather_parts(x: torch.Tensor, group: Group, *, dim: int, length: int) -> torch.Tensor:
    """Returns the parts of all ranks, joined along `dim` to `length` elements.

    The gradient of a part is the **sum** of all ranks' gradients of this part. Use this function if
    the ranks compute different results from the whole array.
    """
    return _exchanged(
        gather_parts,
        x,
        group,
        (_gathered, dim, length),
        (_scattered_sum, dim),
        dim=dim,
        length=length,
    )


def sum_to_parts(x: torch.Tensor, group: Group, *, dim: int) -> torch.Tensor:
    """Returns this rank's part, along `dim`, of the sum of the ranks' arrays.

    The backward pass joins the gradients of all parts.
    """
    length = 0 if group is None else x.shape[dim]
    return _exchanged(
        sum_to_parts, x, group, (_scattered_sum, dim), (_gathered, dim, length), dim=dim
    )


def gather_copies(x: torch.Tensor, group: Group, *, dim: int, length: int) -> torch.Tensor:
    """Returns the parts of all ranks, joined along `dim` to `length` elements.

    Use this function if all ranks compute the same results from the whole array. Since the
    gradients of the joined array are equal on all ranks, the backward pass keeps this rank's part
    of its own gradient.
    """
    return _exchanged(
        gather_copies, x, group, (_gathered, dim, length), (_own_part, dim), dim=dim, length=length
    )


def keep_part(x: torch.Tensor, group: Group, *, dim: int) -> torch.Tensor:
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
    length = 0 if group is None else x.shape[dim]
    return _exchanged(keep_part, x, group, (_own_part, dim), (_gathered, dim, length), dim=dim)


def swap_blocks(x: torch.Tensor, group: Group, *, peer: int, width: int) -> torch.Tensor:
    """Sends x to the rank `peer` of a group, and returns the array that this rank sends back.

    The last dimensions of the two arrays may differ: the result has `width` elements. The backward
    pass swaps the gradients.
    """
    return _exchanged(
        swap_blocks,
        x,
        group,
        (_swapped, peer, width),
        (_swapped, peer, x.shape[-1]),
        peer=peer,
        width=width,
    )


def move_rows(
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    sent: list[int] | None = None,
    arriving: list[int] | None = None,
) -> torch.Tensor:
    """Sends the first `sent[0]` rows to rank 0 of the group, the next to rank 1, and so on.

    Returns `arriving[i]` rows from each rank i, in rank order. None: equally many for each rank.
    The backward pass sends the gradients back. Collective.
    """
    # Gradients of zero are sent too: a rank that did not take part would hang its peers.
    there, back = (_moved, sent, arriving), (_moved, arriving, sent)
    found: torch.Tensor = _Exchange.apply(rows, group, "move_rows", there, back)  # type: ignore[no-untyped-call]
    return found


def exchange_rows(
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    there: Callable[[torch.Tensor], torch.Tensor],
    back: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Returns `there(rows)`, an exchange of rows. The backward pass returns `back(gradient)`."""
    found: torch.Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
        rows, group, "move_rows", (_applied, there), (_applied, back)
    )
    return found


def _applied(
    x: torch.Tensor, _: dist.ProcessGroup, function: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    return function(x)


def _same(x: torch.Tensor, _: dist.ProcessGroup) -> torch.Tensor:
    return x.view_as(x)


def _unchanged(gradient: torch.Tensor, _: dist.ProcessGroup) -> torch.Tensor:
    return gradient


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
    part = _padded(x.movedim(dim, 0) if dim else x, longest)
    whole = part.new_empty(ranks * longest, *part.shape[1:])
    all_gather_single(whole, part, group=group)
    whole = whole if len(whole) == length else whole[:length]
    return whole.movedim(0, dim) if dim else whole


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
    if dist.get_rank(group) == peer:
        return x.view_as(x)
    found = x.new_empty(*x.shape[:-1], width)
    sent = dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=peer)
    received = dist.P2POp(dist.irecv, found, group=group, group_peer=peer)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
    return found


def moved_rows(
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    table: Sequence[Sequence[int]],
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    """Moves rows as `move_rows` does, without gradients. All ranks know the number of rows from
    each rank to each rank, `table[source][destination]`.

    Returns the arriving rows in this `order` (None: rank order).
    """
    if rows.is_cpu and (exchange := row_exchange_of(group)) is not None:
        lent = exchange.move(rows, table)
        return lent.clone() if order is None else lent[order]
    rank = dist.get_rank(group)
    found = _moved(rows, group, list(table[rank]), [row[rank] for row in table])
    return found if order is None else found[order]


def _moved(
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    sent: list[int] | None,
    arriving: list[int] | None,
) -> torch.Tensor:
    count = len(rows) if arriving is None else sum(arriving)
    found = rows.new_empty(count, *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), arriving, sent, group=group)
    return found


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    """Returns x as a contiguous array, padded with zeros to `length` rows."""
    missing = length - x.shape[0]
    if missing == 0:
        return x.contiguous()
    return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))

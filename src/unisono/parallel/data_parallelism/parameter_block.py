"""The block of a whole parameter that a rank holds, and the ranks that sum its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from unisono.planner import part_of

_ATTRIBUTE = "unisono_block"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterBlock:
    """A rectangular block of a parameter of the whole model."""

    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    start: tuple[int, ...]
    """Index of the block's first element in the whole parameter, by dimension."""
    summed_over: str = "tokens"
    """Name in `GROUPS` of the group that sums the gradient: its ranks hold this block and see
    different tokens."""
    held_by: str = "stage"
    """Name in `GROUPS` of the group whose ranks hold this block."""


def block_of(parameter: nn.Parameter) -> ParameterBlock:
    """Returns the block that `cut` or `mark` recorded; by default the whole parameter."""
    noted = getattr(parameter, _ATTRIBUTE, None)
    if isinstance(noted, ParameterBlock):
        return noted
    return ParameterBlock(shape=tuple(parameter.shape), start=(0,) * parameter.dim())


def mark(parameter: nn.Parameter, *, summed_over: str, held_by: str = "stage") -> None:
    """Records which groups sum and hold a parameter; its block stays the same."""
    known = block_of(parameter)
    block = ParameterBlock(
        shape=known.shape, start=known.start, summed_over=summed_over, held_by=held_by
    )
    setattr(parameter, _ATTRIBUTE, block)


def cut(
    module: nn.Module,
    name: str,
    *,
    dim: int,
    part: int,
    parts: int,
    summed_over: str = "tokens",
    held_by: str = "tokens",
) -> None:
    """Replaces a module's parameter by part number `part` of `parts` along `dim`.

    Parts have ceil(length / parts) elements, and the last parts fewer, as in torch. A parameter
    that is None stays None.

    >>> linear = nn.Linear(3, 5)
    >>> cut(linear, "weight", dim=0, part=1, parts=2)
    >>> linear.weight.shape, block_of(linear.weight).start
    (torch.Size([2, 3]), (3, 0))
    """
    parameter: nn.Parameter | None = getattr(module, name)
    if parameter is None:
        return
    start, sizes = [0] * parameter.dim(), list(parameter.shape)
    start[dim], sizes[dim] = part_of(parameter.shape[dim], part, parts)
    keep(module, name, start=start, sizes=sizes, summed_over=summed_over, held_by=held_by)


def keep(
    module: nn.Module,
    name: str,
    *,
    start: Sequence[int],
    sizes: Sequence[int],
    summed_over: str,
    held_by: str,
) -> None:
    """Replaces a module's parameter by its block of `sizes` elements from `start` on.

    >>> linear = nn.Linear(3, 5)
    >>> keep(linear, "weight", start=(1, 2), sizes=(4, 1), summed_over="own", held_by="own")
    >>> linear.weight.shape, block_of(linear.weight).start
    (torch.Size([4, 1]), (1, 2))
    """
    parameter = getattr(module, name)
    if not isinstance(parameter, nn.Parameter):
        raise ValueError(
            f"{type(module).__name__}.{name}: expected a parameter, got a tensor that the module "
            "computes, as pruning and norms of weights do; a layout that does not divide it works"
        )
    known = block_of(parameter)
    part = tuple(slice(a, a + count) for a, count in zip(start, sizes, strict=True))
    kept = nn.Parameter(
        parameter.detach()[part].clone(memory_format=torch.contiguous_format),
        requires_grad=parameter.requires_grad,
    )
    block = ParameterBlock(
        shape=known.shape,
        start=tuple(a + b for a, b in zip(known.start, start, strict=True)),
        summed_over=summed_over,
        held_by=held_by,
    )
    vars(kept).update(vars(parameter))  # a program may have marked the parameter
    setattr(kept, _ATTRIBUTE, block)
    setattr(module, name, kept)

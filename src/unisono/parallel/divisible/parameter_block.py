"""The block of a whole parameter that a rank holds, and the ranks that sum its gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import nn

from unisono.division import part_of
from unisono.parallel.training_mesh import TrainingMesh

_ATTRIBUTE = "unisono_block"
_COPIES: Mapping[str, str] = MappingProxyType({"tp": "tokens", "ep": "expert_tokens"})
"""By axis: the ranks that hold the same part of a parameter, and process different tokens."""

Span = tuple[int, int]
"""Indices along a dimension: the first one, and their number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterBlock:
    """A block of a parameter of the whole model: a rectangle, or several that are joined."""

    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    start: tuple[int, ...]
    """Index of the block's first element in the whole parameter, by dimension."""
    summed_over: str = "tokens"
    """Name in `GROUPS` of the group that sums the gradient: its ranks hold this block and see
    different tokens."""
    held_by: str = "stage"
    """Name in `GROUPS` of the group whose ranks hold this block."""
    dim: int = 0
    """The dimension along which `spans` are joined."""
    spans: tuple[Span, ...] = ()
    """The ranges of the whole parameter along `dim` that the block joins, such as a part of the
    queries, keys and values of a fused projection. Empty for a rectangle."""


def block_of(parameter: nn.Parameter) -> ParameterBlock:
    """Returns the block that `cut` or another function of this file recorded; by default the whole
    parameter."""
    noted = getattr(parameter, _ATTRIBUTE, None)
    if isinstance(noted, ParameterBlock):
        return noted
    return ParameterBlock(shape=tuple(parameter.shape), start=(0,) * parameter.dim())


def sum_over_tp(parameter: nn.Parameter) -> None:
    """Makes the ranks of `tp` sum the gradient of a whole parameter, too.

    For a parameter of which each rank computes a part of the gradient, such as the weight of a norm
    of heads, if each rank has its own heads. The gradient of other whole parameters is equal on the
    ranks of `tp`.

    >>> norm = nn.RMSNorm(4)
    >>> sum_over_tp(norm.weight)
    >>> block_of(norm.weight).summed_over
    'stage'
    """
    known = block_of(parameter)
    setattr(parameter, _ATTRIBUTE, replace(known, summed_over="stage", held_by="stage"))


def cut(
    module: nn.Module,
    name: str,
    mesh: TrainingMesh,
    *,
    dim: int,
    axis: str = "tp",
    copies: str | None = None,
) -> None:
    """Keeps this rank's part of a module's parameter along a dimension.

    The ranks of an axis of the mesh, "tp" or "ep", keep the parts in their order. Parts have
    ceil(length / ranks) elements, and the last parts fewer, as in torch. A parameter that is None
    stays None; with one rank on the axis, the parameter stays whole. `copies`: name in `GROUPS` of
    the ranks that hold the same part and sum its gradient; None for "tp" and "ep".

    >>> import unisono
    >>> from torch import distributed as dist
    >>> from unisono.parallel import Layout, TrainingMesh
    >>> def rows():
    ...     dist.init_process_group("unisono")
    ...     linear = nn.Linear(3, 5)
    ...     cut(linear, "weight", TrainingMesh(Layout(tp=2)), dim=0)
    ...     return tuple(linear.weight.shape)
    >>> unisono.run(rows, ranks=2)
    [(3, 3), (2, 3)]
    """
    parameter: nn.Parameter | None = getattr(module, name)
    ranks = mesh.ranks(axis)
    if parameter is None or (len(ranks) == 1 and copies is None):
        return
    start, sizes = [0] * parameter.dim(), list(parameter.shape)
    start[dim], sizes[dim] = part_of(sizes[dim], ranks.index(mesh.rank), len(ranks))
    keep(module, name, start=start, sizes=sizes, copies=copies or _COPIES[axis])


def keep(
    module: nn.Module, name: str, *, start: Sequence[int], sizes: Sequence[int], copies: str
) -> None:
    """Replaces a module's parameter by its block of `sizes` elements from `start` on.

    `copies`: name in `GROUPS` of the ranks that hold this block and sum its gradient.

    >>> linear = nn.Linear(3, 5)
    >>> keep(linear, "weight", start=(1, 2), sizes=(4, 1), copies="own")
    >>> linear.weight.shape, block_of(linear.weight).start
    (torch.Size([4, 1]), (1, 2))
    """
    parameter = _parameter(module, name)
    known = block_of(parameter)
    part = tuple(slice(a, a + count) for a, count in zip(start, sizes, strict=True))
    block = ParameterBlock(
        shape=known.shape,
        start=tuple(a + b for a, b in zip(known.start, start, strict=True)),
        summed_over=copies,
        held_by=copies,
    )
    _replace(module, name, parameter.detach()[part], block)


def keep_spans(
    module: nn.Module, name: str, *, dim: int, spans: Sequence[Span], copies: str
) -> None:
    """Replaces a module's whole parameter by these ranges of it along `dim`, joined.

    `copies`: name in `GROUPS` of the ranks that hold these ranges and sum their gradient.

    >>> linear = nn.Linear(3, 8)
    >>> keep_spans(linear, "bias", dim=0, spans=[(0, 2), (4, 2)], copies="own")
    >>> linear.bias.shape, block_of(linear.bias).spans
    (torch.Size([4]), ((0, 2), (4, 2)))
    """
    parameter = _parameter(module, name)
    joined = _joined(spans)
    start = [0] * parameter.dim()
    start[dim] = joined[0][0]
    block = ParameterBlock(
        shape=tuple(parameter.shape),
        start=tuple(start),
        summed_over=copies,
        held_by=copies,
        dim=dim,
        spans=joined if len(joined) > 1 else (),
    )
    parts = [parameter.detach().narrow(dim, first, count) for first, count in joined]
    _replace(module, name, torch.cat(parts, dim), block)


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Returns ranges with those that follow each other joined."""
    found: list[Span] = []
    for first, count in spans:
        if found and sum(found[-1]) == first:
            found[-1] = found[-1][0], found[-1][1] + count
        else:
            found.append((first, count))
    return tuple(found)


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    parameter = getattr(module, name)
    if not isinstance(parameter, nn.Parameter):
        raise ValueError(
            f"{type(module).__name__}.{name}: expected a parameter, got a tensor that the module "
            "computes, as pruning and norms of weights do; a layout that does not divide it works"
        )
    return parameter


def _replace(module: nn.Module, name: str, values: torch.Tensor, block: ParameterBlock) -> None:
    """Replaces a module's parameter by a copy of a part of its values."""
    parameter = getattr(module, name)
    kept = nn.Parameter(
        values.clone(memory_format=torch.contiguous_format),
        requires_grad=parameter.requires_grad,
    )
    vars(kept).update(vars(parameter))  # a program may have marked the parameter
    setattr(kept, _ATTRIBUTE, block)
    setattr(module, name, kept)

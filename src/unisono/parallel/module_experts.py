"""The experts of a torch module's layer: their number, their width, and the block around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn


class ExpertBlock(NamedTuple):
    """The module of a layer that holds a router and experts, and the experts' sizes."""

    module: nn.Module
    experts: int
    matrices: int
    """Matrices of an expert: 3 with a gate, else 2."""
    ffn: int
    """Inner width of an expert."""
    shared: int
    """Number of experts of width `ffn` that see every token."""


class _Experts(NamedTuple):
    """The routed experts: their number, and the shapes of the matrices of one expert."""

    module: nn.Module
    number: int
    shapes: Sequence[tuple[int, ...]]


def find_experts(layer: nn.Module) -> ExpertBlock | None:
    """Returns the block of experts of a layer; None for a dense layer.

    Experts are equal modules in a `ModuleList`, or parameters of three dimensions, the first of
    which counts the experts. The router is a matrix with a row for each expert. All other matrices
    of the block belong to shared experts. Raises ValueError if no router is found, and if the sizes
    of the experts do not fit together.
    """
    routed = next(_routed(layer), None)
    if routed is None:
        return None
    own = {id(parameter) for parameter in routed.module.parameters()}
    for module in reversed(list(layer.modules())):
        inside = {id(parameter): parameter for parameter in module.parameters()}
        others = [inside[key] for key in inside if key not in own and inside[key].dim() > 1]
        router = next((p for p in others if _routes(p, routed)), None)
        if own <= set(inside) and router is not None:
            hidden = router.numel() // routed.number
            matrices, ffn = _network(routed, hidden)
            rest = sum(p.numel() for p in others if p is not router)
            shared, left = divmod(rest, matrices * hidden * ffn)
            if left:
                raise ValueError(
                    f"the shared experts of {type(module).__name__} have {rest} elements, which is "
                    f"no multiple of an expert's {matrices} x {hidden} x {ffn}; state the shape "
                    "as planner.Transformer(...)"
                )
            return ExpertBlock(module, routed.number, matrices, ffn, shared)
    raise ValueError(
        f"{type(layer).__name__} has {routed.number} experts, but no router with a row for each"
    )


def _routes(parameter: nn.Parameter, routed: _Experts) -> bool:
    """Returns True for a matrix with a row for each expert, as wide as the experts' input."""
    if parameter.dim() != 2 or routed.number not in parameter.shape:
        return False
    width = parameter.numel() // routed.number
    return all(width in shape for shape in routed.shapes)


def _routed(layer: nn.Module) -> Iterator[_Experts]:
    for module in layer.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            every = [[tuple(p.shape) for p in each.parameters()] for each in module]
            shapes = [shape for shape in every[0] if len(shape) == 2]
            if len(shapes) > 1 and all(each == every[0] for each in every):
                yield _Experts(module, len(module), shapes)
        stacked = [tuple(p.shape) for p in module.parameters(recurse=False) if p.dim() == 3]
        counts = {shape[0] for shape in stacked}
        if len(stacked) > 1 and len(counts) == 1 and counts != {1}:
            yield _Experts(module, counts.pop(), [shape[1:] for shape in stacked])


def _network(routed: _Experts, hidden: int) -> tuple[int, int]:
    """Returns the number of matrices of an expert, and its inner width.

    Gate and input may be one matrix of twice the width.
    """
    elements = sum(rows * columns for rows, columns in routed.shapes)
    widths = sorted({size for shape in routed.shapes for size in shape})
    for matrices in (3, 2):
        ffn, left = divmod(elements, matrices * hidden)
        if left == 0 and ffn in widths:
            return matrices, ffn
    raise ValueError(
        f"the matrices of an expert, {routed.shapes}, are no feed-forward network of width {hidden}"
    )


@contextmanager
def skipped(blocks: Sequence[ExpertBlock], *, in_pair: bool) -> Iterator[None]:
    """Makes the blocks return their input, so that the rest of the module runs without values.

    The routing of tokens depends on values, which a run on the meta device does not have.
    `in_pair`: the blocks return a pair of their input and None.
    """

    def forward(x: torch.Tensor, *_: Any, **__: Any) -> Any:
        return (x, None) if in_pair else x

    before = [vars(each.module).get("forward") for each in blocks]
    for each in blocks:
        vars(each.module)["forward"] = forward
    try:
        yield
    finally:
        for each, known in zip(blocks, before, strict=True):
            if known is None:
                del vars(each.module)["forward"]
            else:
                vars(each.module)["forward"] = known

"""The elements that a rank sends on the grid of `tp` in 2D, 2.5D and 3D, from closed forms.

In the forward pass of a product of M x K and K x N elements, a rank sends on planes of q x q ranks
(q-1)/q^2 (M K + K N) elements, with M divided by the number of planes, and in a cube of l x l x l
ranks (l-1)/l^3 (M K + K N + M N) elements. In the backward pass it sends twice as many on planes,
and as many in a cube. The functions use the sizes of this rank's blocks, which may be uneven.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from torch import nn

from unisono.parallel.layers import (
    FeatureNorm,
    FeedForward,
    LogitHead,
    SelfAttention,
    TokenEmbedding,
)
from unisono.planner import Layout, part_of

_LOSS_SUMS = 3
_NORM_SUMS = 4  # sums of x and of x^2, each forward and backward


def grid_elements(
    stage: nn.Module,
    layout: Layout,
    place: Mapping[str, int],
    *,
    tokens: int,
) -> float:
    """Returns the elements of activations and weights that a rank sends in a microbatch's passes.

    `tokens`: number of tokens of the microbatch.

    `place`: the rank's coordinates on the axes of the mesh.
    """
    grid, elements = _grid(layout, place, tokens), 0.0
    for module in stage.modules():
        if isinstance(module, TokenEmbedding):
            elements += grid.look_up(module)
        for linears, is_last in _products(module):
            elements += grid.product(linears, is_last=is_last)
    return elements


def grid_sums(stage: nn.Module, layout: Layout, place: Mapping[str, int], *, tokens: int) -> float:
    """Returns the elements of norms and losses that a rank sends in the passes of a microbatch."""
    grid, elements = _grid(layout, place, tokens), 0.0
    for module in stage.modules():
        if isinstance(module, FeatureNorm):
            elements += grid.sums(_NORM_SUMS if module.is_centred else _NORM_SUMS // 2)
        elif isinstance(module, LogitHead):
            elements += grid.sums(_LOSS_SUMS)
    return elements


def _grid(layout: Layout, place: Mapping[str, int], tokens: int) -> _Grid:
    return (_Cube if layout.tensor == "3d" else _Planes)(layout, place, tokens=tokens)


def _products(module: nn.Module) -> Iterator[tuple[list[nn.Linear], bool]]:
    """Yields the matrices that multiply the same input, and whether they are last matrices.

    A last matrix maps a layer's inner activation to its output.
    """
    if isinstance(module, SelfAttention):
        yield [module.query, module.key, module.value], False
        yield [module.output], True
    elif isinstance(module, FeedForward):
        yield [module.up] if module.gate is None else [module.up, module.gate], False
        yield [module.down], True
    elif isinstance(module, LogitHead):
        yield [module.projection], False


class _Grid(ABC):
    """The traffic of one rank on the grid of `tp`, from the sizes of its blocks."""

    def __init__(self, layout: Layout, place: Mapping[str, int], *, tokens: int) -> None:
        self._place, self._side = place, layout.tensor_grid.row
        self._others = self._side - 1
        self._tokens = tokens // (layout.tensor_grid.depth * self._side)

    def _width(self, width: int, axis: str) -> int:
        return part_of(width, self._place[axis], self._side)[1]

    def sums(self, count: int) -> float:
        """Returns the elements sent to sum one number per token over the ranks, `count` times."""
        return count * 2 * self._others / self._side * self._tokens

    @abstractmethod
    def product(self, linears: list[nn.Linear], *, is_last: bool) -> float:
        """Returns the elements sent to multiply one input by several matrices."""

    @abstractmethod
    def look_up(self, module: TokenEmbedding) -> float:
        """Returns the elements sent for a look-up in an embedding table."""


class _Planes(_Grid):
    """The traffic of tensor parallelism in 2D and 2.5D."""

    def product(self, linears: list[nn.Linear], *, is_last: bool) -> float:
        width = linears[0].in_features
        own_x = self._tokens * self._width(width, "tp_column")
        outputs = sum(self._width(each.out_features, "tp_column") for each in linears)
        own_weight = outputs * self._width(width, "tp_row")
        broadcasts = 2 * self._others * (own_x + own_weight)  # once forward, once backward
        return broadcasts + (self._tokens * width - own_x) + (outputs * width - own_weight)

    def look_up(self, module: TokenEmbedding) -> float:
        of_row, of_column = (self._width(module.width, axis) for axis in ("tp_row", "tp_column"))
        scattered = 2 * self._others * self._tokens * of_row
        if self._place["tp_row"] == self._place["tp_column"]:
            return scattered
        # swaps of blocks, forward and backward
        return scattered + self._tokens * (of_row + of_column)


class _Cube(_Grid):
    """The traffic of tensor parallelism in 3D."""

    def product(self, linears: list[nn.Linear], *, is_last: bool) -> float:
        inner, outer = ("tp_row", "tp_column") if is_last else ("tp_column", "tp_row")
        inputs = self._width(linears[0].in_features, inner)
        outputs = sum(self._width(each.out_features, outer) for each in linears)
        moved = self._tokens * (inputs + outputs) + self._longest(inputs) * outputs
        return 2 * self._others * moved

    def look_up(self, module: TokenEmbedding) -> float:
        inputs = self._width(module.width, "tp_column")
        rows = self._width(module.vocab, "tp_row")
        return 2 * self._others * (self._tokens * inputs + self._longest(inputs) * rows)

    def _longest(self, inputs: int) -> int:
        """Returns the length of the longest part along the depth, to which others are padded."""
        return -(-inputs // self._side)

"""The elements that a rank sends on the grid of `tp` in 2D, 2.5D and 3D, from closed forms.

In the forward pass of a product of M x K and K x N elements, a rank sends on planes of q x q ranks
(q-1)/q^2 (M K + K N) elements, with M divided by the number of planes, and in a cube of l x l x l
ranks (l-1)/l^3 (M K + K N + M N) elements. In the backward pass it sends twice as many on planes,
and as many in a cube. The functions use the sizes of this rank's blocks, which may be uneven.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import nn

from unisono.division import part_of
from unisono.parallel.divisible.interfaces import MicrobatchPart
from unisono.planner import Layout


class GridTraffic(ABC):
    """The traffic of one rank on the grid of `tp`. `tokens` are those of the whole grid."""

    def __init__(self, layout: Layout, place: Mapping[str, int]) -> None:
        """`place`: the rank's coordinates on the axes of the mesh."""
        self._place, self._side = place, layout.tensor_grid.row
        self._others = self._side - 1
        self._rows = layout.tensor_grid.depth * self._side

    def _width(self, width: int, axis: str) -> int:
        return part_of(width, self._place[axis], self._side)[1]

    def sums(self, tokens: int, count: int) -> float:
        """Returns the elements sent to sum one number per token over the ranks, `count` times."""
        return count * 2 * self._others / self._side * (tokens // self._rows)

    @abstractmethod
    def product(self, tokens: int, linears: Sequence[nn.Linear], *, is_last: bool) -> float:
        """Returns the elements sent to multiply one input by several matrices.

        `is_last`: they map a layer's inner activation to its output.
        """

    @abstractmethod
    def look_up(self, tokens: int, vocab: int, width: int) -> float:
        """Returns the elements sent for a look-up in an embedding table."""


class PlaneTraffic(GridTraffic):
    """The traffic of tensor parallelism in 2D and 2.5D."""

    def product(self, tokens: int, linears: Sequence[nn.Linear], *, is_last: bool) -> float:
        tokens, width = tokens // self._rows, linears[0].in_features
        own_x = tokens * self._width(width, "tp_column")
        outputs = sum(self._width(each.out_features, "tp_column") for each in linears)
        own_weight = outputs * self._width(width, "tp_row")
        broadcasts = 2 * self._others * (own_x + own_weight)  # once forward, once backward
        return broadcasts + (tokens * width - own_x) + (outputs * width - own_weight)

    def look_up(self, tokens: int, vocab: int, width: int) -> float:
        tokens //= self._rows
        of_row, of_column = (self._width(width, axis) for axis in ("tp_row", "tp_column"))
        scattered = 2 * self._others * tokens * of_row
        if self._place["tp_row"] == self._place["tp_column"]:
            return scattered
        return scattered + tokens * (of_row + of_column)  # swaps of blocks, forward and backward


class CubeTraffic(GridTraffic):
    """The traffic of tensor parallelism in 3D."""

    def product(self, tokens: int, linears: Sequence[nn.Linear], *, is_last: bool) -> float:
        inner, outer = ("tp_row", "tp_column") if is_last else ("tp_column", "tp_row")
        inputs = self._width(linears[0].in_features, inner)
        outputs = sum(self._width(each.out_features, outer) for each in linears)
        moved = tokens // self._rows * (inputs + outputs) + self._longest(inputs) * outputs
        return 2 * self._others * moved

    def look_up(self, tokens: int, vocab: int, width: int) -> float:
        inputs, rows = self._width(width, "tp_column"), self._width(vocab, "tp_row")
        return 2 * self._others * (tokens // self._rows * inputs + self._longest(inputs) * rows)

    def _longest(self, inputs: int) -> int:
        """Returns the length of the longest part along the depth, to which others are padded."""
        return -(-inputs // self._side)


class GridElements:
    """The elements that tensor parallelism on a grid sends; see `TensorParallel`."""

    def __init__(self, traffic: GridTraffic) -> None:
        self._traffic = traffic

    def first_elements(self, part: MicrobatchPart, linears: Sequence[nn.Linear]) -> float:
        return self._traffic.product(part.tokens, linears, is_last=False)

    def last_elements(self, part: MicrobatchPart, linear: nn.Linear) -> float:
        return self._traffic.product(part.tokens, [linear], is_last=True)

    def look_up_elements(self, part: MicrobatchPart, vocab: int, width: int) -> float:
        return self._traffic.look_up(part.tokens, vocab, width)

    def sum_elements(self, part: MicrobatchPart, count: int) -> float:
        return self._traffic.sums(part.tokens, count)

"""Tensor parallelism over planes of ranks (2D, 2.5D) and over a cube of ranks (3D).

Between layers, the columns of a grid divide the width, and its depth and rows the samples: the rank
at depth d in row i and column j holds part i of part d of the samples, and part j of the width.

The elements that a rank sends follow from the sizes of its blocks, which may be uneven. With even
blocks, the forward pass of a product of M x K and K x N elements sends (q-1)/q^2 (M K + K N)
elements on planes of q x q ranks, with M divided by the number of planes, and (l-1)/l^3 (M K + K N
+ M N) in a cube of l x l x l ranks. The backward pass sends twice as many on planes, and as many in
a cube.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from unisono.division import part_of
from unisono.parallel.divisible.exchanges import gather_parts, sum_to_parts, swap_blocks
from unisono.parallel.divisible.interfaces import MicrobatchPart
from unisono.parallel.divisible.parameter_block import cut
from unisono.parallel.layers.summa import summa
from unisono.parallel.layers.tensor_1d import own_rows
from unisono.parallel.training_mesh import TrainingMesh

ROW, COLUMN, DEPTH = "tp_row", "tp_column", "tp_depth"


class _Grid(ABC):
    """The matrices of a layer, divided over a grid of ranks. The subclasses have the methods of
    `Tensor1D`; the tokens of a `MicrobatchPart` are those of the whole grid."""

    def __init__(self, mesh: TrainingMesh) -> None:
        self._mesh, self._place = mesh, mesh.coordinates
        self._depth, self.parts, _ = mesh.layout.tensor_grid
        self._others = self.parts - 1

    def divide_between(self, module: nn.Module, name: str) -> None:
        parameter: nn.Parameter | None = getattr(module, name)
        if parameter is not None:
            self._cut(module, name, (parameter.dim() - 1, COLUMN), copies="row_tokens")

    def first_elements(self, part: MicrobatchPart, linears: Sequence[nn.Linear]) -> float:
        return self._product_elements(self._own_tokens(part), linears, is_last=False)

    def last_elements(self, part: MicrobatchPart, linear: nn.Linear) -> float:
        return self._product_elements(self._own_tokens(part), [linear], is_last=True)

    def sum_elements(self, part: MicrobatchPart, count: int) -> float:
        return count * 2 * self._others / self.parts * self._own_tokens(part)

    @abstractmethod
    def _product_elements(
        self, tokens: int, linears: Sequence[nn.Linear], *, is_last: bool
    ) -> float:
        """Returns the elements sent to multiply one input by several matrices.

        `tokens`: those of this rank. `is_last`: they map a layer's inner activation to its output.
        """

    def _cut(self, module: nn.Module, name: str, *cuts: tuple[int, str], copies: str) -> None:
        """Keeps this rank's block of a parameter, cut along each (dimension, axis) in turn.

        `copies`: name in `GROUPS` of the group whose ranks hold the same block and see different
        tokens.
        """
        for dim, axis in cuts:
            cut(module, name, self._mesh, dim=dim, axis=axis, copies=copies)

    def _own_tokens(self, part: MicrobatchPart) -> int:
        return part.tokens // (self._depth * self.parts)

    def _own_width(self, width: int, axis: str) -> int:
        return part_of(width, self._place[axis], self.parts)[1]

    def _samples_at_depth(self, x: torch.Tensor) -> torch.Tensor:
        begin, count = part_of(len(x), self._place[DEPTH], self._depth)
        return x[begin : begin + count]


class Tensor2D(_Grid):
    """A grid of planes of q x q ranks, which see different samples and hold the same matrices.

    Of each matrix, a rank holds the inputs of the part of its row and the outputs of the part of
    its column.

    Xu et al., "Optimus: an efficient 2D method for training super-large deep learning models",
    2021; Wang et al., "Tesseract: parallelize the tensor parallelism efficiently", 2021 (2.5D).
    """

    def divide_first(self, linear: nn.Linear) -> None:
        self.divide_table(linear, "weight")
        self.divide_between(linear, "bias")

    divide_last = divide_first

    def divide_table(self, module: nn.Module, name: str) -> None:
        self._cut(module, name, (0, COLUMN), (1, ROW), copies="depth_tokens")

    def first(self, x: torch.Tensor, linears: Sequence[nn.Linear]) -> list[torch.Tensor]:
        """Multiplies by all matrices at once, so that the input is sent only once."""
        weights = [each.weight for each in linears]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        row, column = self._mesh.group(COLUMN), self._mesh.group(ROW)
        whole = summa(x, weight, row, column, width=linears[0].in_features)
        found = [whole]
        if len(weights) > 1:
            found = list(torch.split(whole, [len(each) for each in weights], dim=-1))
        return [
            y if each.bias is None else y + each.bias
            for y, each in zip(found, linears, strict=True)
        ]

    def last(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        return self.first(x, [linear])[0]

    def look_up(
        self, tokens: torch.Tensor, table: torch.Tensor, *, first: int, width: int
    ) -> torch.Tensor:
        """Returns this rank's block of the vectors of tokens.

        The ranks of a row sum over their parts of the vocabulary, and scatter the sum by samples.
        Then the ranks (i, j) and (j, i) swap their blocks.
        """
        found = own_rows(self._samples_at_depth(tokens), table, first)
        found = sum_to_parts(found, self._mesh.group(COLUMN), dim=0)
        depth, row, column = (self._place[axis] for axis in (DEPTH, ROW, COLUMN))
        peer = (depth * self.parts + column) * self.parts + row
        own_width = self._own_width(width, COLUMN)
        return swap_blocks(found, self._mesh.group("tp"), peer=peer, width=own_width)

    def look_up_elements(self, part: MicrobatchPart, vocab: int, width: int) -> float:
        tokens = self._own_tokens(part)
        of_row, of_column = (self._own_width(width, axis) for axis in (ROW, COLUMN))
        scattered = 2 * self._others * tokens * of_row
        if self._place[ROW] == self._place[COLUMN]:
            return scattered
        return scattered + tokens * (of_row + of_column)  # swaps of blocks, forward and backward

    def _product_elements(
        self, tokens: int, linears: Sequence[nn.Linear], *, is_last: bool
    ) -> float:
        width = linears[0].in_features
        own_x = tokens * self._own_width(width, COLUMN)
        outputs = sum(self._own_width(each.out_features, COLUMN) for each in linears)
        own_weight = outputs * self._own_width(width, ROW)
        broadcasts = 2 * self._others * (own_x + own_weight)  # once forward, once backward
        return broadcasts + (tokens * width - own_x) + (outputs * width - own_weight)


class Tensor3D(_Grid):
    """A cube of l x l x l ranks.

    A product gathers each of its two factors along one axis of the cube, and scatters the sum along
    the third axis. In the result of a first matrix, rows and columns are exchanged: depth and
    columns divide its samples, and rows its width. A last matrix exchanges them back.

    Agarwal et al., "A three-dimensional approach to parallel matrix multiplication", 1995; Bian et
    al., "Maximizing parallelism in distributed training for huge neural networks", 2021.
    """

    def divide_first(self, linear: nn.Linear) -> None:
        self.divide_table(linear, "weight")
        self._cut(linear, "bias", (0, ROW), copies="column_tokens")

    def divide_last(self, linear: nn.Linear) -> None:
        self._cut(linear, "weight", (0, COLUMN), (1, ROW), (1, DEPTH), copies="tokens")
        self.divide_between(linear, "bias")

    def divide_table(self, module: nn.Module, name: str) -> None:
        self._cut(module, name, (0, ROW), (1, COLUMN), (1, DEPTH), copies="tokens")

    def first(self, x: torch.Tensor, linears: Sequence[nn.Linear]) -> list[torch.Tensor]:
        gathered = self._gather_samples(x, ROW)
        return [self._product(gathered, each, COLUMN) for each in linears]

    def last(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        return self._product(self._gather_samples(x, COLUMN), linear, ROW)

    def look_up(
        self, tokens: torch.Tensor, table: torch.Tensor, *, first: int, width: int
    ) -> torch.Tensor:
        whole = self._gather_inputs(table, width, COLUMN)
        found = own_rows(self._samples_at_depth(tokens), whole, first)
        return sum_to_parts(found, self._mesh.group(ROW), dim=0)

    def look_up_elements(self, part: MicrobatchPart, vocab: int, width: int) -> float:
        inputs, rows = self._own_width(width, COLUMN), self._own_width(vocab, ROW)
        moved = self._own_tokens(part) * inputs + self._longest(inputs) * rows
        return 2 * self._others * moved

    def _product_elements(
        self, tokens: int, linears: Sequence[nn.Linear], *, is_last: bool
    ) -> float:
        inner, outer = (ROW, COLUMN) if is_last else (COLUMN, ROW)
        inputs = self._own_width(linears[0].in_features, inner)
        outputs = sum(self._own_width(each.out_features, outer) for each in linears)
        return 2 * self._others * (tokens * (inputs + outputs) + self._longest(inputs) * outputs)

    def _product(self, gathered: torch.Tensor, linear: nn.Linear, summed: str) -> torch.Tensor:
        """Multiplies by a matrix whose inputs are split along the axis `summed`."""
        weight = self._gather_inputs(linear.weight, linear.in_features, summed)
        y = functional.linear(gathered, weight)
        y = sum_to_parts(y, self._mesh.group(summed), dim=0)
        return y if linear.bias is None else y + linear.bias

    def _gather_samples(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        return gather_parts(x, self._mesh.group(axis), dim=0, length=len(x) * self.parts)

    def _gather_inputs(self, weight: torch.Tensor, width: int, axis: str) -> torch.Tensor:
        """Returns a weight's columns for this rank's part of the inputs, gathered along the depth.

        `axis`: the axis of the cube that splits the `width` inputs into parts.
        """
        count = self._own_width(width, axis)
        return gather_parts(weight, self._mesh.group(DEPTH), dim=1, length=count)

    def _longest(self, inputs: int) -> int:
        """Returns the length of the longest part along the depth, to which others are padded."""
        return -(-inputs // self.parts)

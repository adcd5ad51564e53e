"""Tensor parallelism over a plane of ranks, or over several planes that see different samples.

The rank in row i and column j of a plane holds part i of the plane's samples and part j of the
width. Of each matrix it holds the inputs of part i and the outputs of part j. All planes (2.5D)
hold the same matrices.

Xu et al., "Optimus: an efficient 2D method for training super-large deep learning models", 2021;
Wang et al., "Tesseract: parallelize the tensor parallelism efficiently", 2021 (2.5D).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unisono.division import part_of
from unisono.parallel.divisible.exchanges import sum_to_parts, swap_blocks
from unisono.parallel.layers.grid_cuts import (
    COLUMN,
    DEPTH,
    ROW,
    cut_between_layers,
    cut_on_grid,
)
from unisono.parallel.layers.grid_traffic import GridElements, PlaneTraffic
from unisono.parallel.layers.summa import summa
from unisono.parallel.layers.tensor_1d import own_rows
from unisono.parallel.training_mesh import TrainingMesh


class Tensor2D(GridElements):
    """The matrices of a layer, divided over planes of q x q ranks; see `TensorParallel`."""

    def __init__(self, mesh: TrainingMesh) -> None:
        super().__init__(PlaneTraffic(mesh.layout, mesh.coordinates))
        self._mesh = mesh
        self._planes, self.parts, _ = mesh.layout.tensor_grid
        place = mesh.coordinates
        self._depth, self._row, self._column = (place[axis] for axis in (DEPTH, ROW, COLUMN))
        self._along_row, self._along_column = mesh.group(COLUMN), mesh.group(ROW)

    def divide_first(self, linear: nn.Linear) -> None:
        self.divide_table(linear, "weight")
        self.divide_between(linear, "bias")

    divide_last = divide_first

    def divide_table(self, module: nn.Module, name: str) -> None:
        cut_on_grid(module, name, self._mesh, [(0, COLUMN), (1, ROW)], copies="depth_tokens")

    def divide_between(self, module: nn.Module, name: str) -> None:
        cut_between_layers(module, name, self._mesh)

    def first(self, x: torch.Tensor, linears: Sequence[nn.Linear]) -> list[torch.Tensor]:
        """Multiplies by all matrices at once, so that the input is sent only once."""
        weights = [each.weight for each in linears]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        width = linears[0].in_features
        whole = summa(x, weight, self._along_row, self._along_column, width=width)
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
        begin, count = part_of(len(tokens), self._depth, self._planes)
        found = own_rows(tokens[begin : begin + count], table, first)
        found = sum_to_parts(found, self._along_row, dim=0)
        peer = (self._depth * self.parts + self._column) * self.parts + self._row
        _, own_width = part_of(width, self._column, self.parts)
        return swap_blocks(found, self._mesh.group("tp"), peer=peer, width=own_width)

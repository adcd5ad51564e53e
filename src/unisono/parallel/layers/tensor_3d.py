"""Tensor parallelism over a cube of ranks.

A product gathers each of its two factors along one axis of the cube, and scatters the sum along the
third axis. Between layers, rank (i, j, k) of the cube holds part j of part i of the samples, and
part k of the width. The result of a first matrix has j and k exchanged: i and k divide its samples,
and j its width. A last matrix exchanges them back.

Agarwal et al., "A three-dimensional approach to parallel matrix multiplication", 1995; Bian et al.,
"Maximizing parallelism in distributed training for huge neural networks", 2021.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from unisono.division import part_of
from unisono.parallel.divisible.exchanges import gather_parts, sum_to_parts
from unisono.parallel.layers.grid_cuts import (
    COLUMN,
    DEPTH,
    ROW,
    cut_between_layers,
    cut_on_grid,
)
from unisono.parallel.layers.grid_traffic import CubeTraffic, GridElements
from unisono.parallel.layers.tensor_1d import own_rows
from unisono.parallel.training_mesh import TrainingMesh


class Tensor3D(GridElements):
    """The matrices of a layer, divided over a cube of l x l x l ranks; see `TensorParallel`."""

    def __init__(self, mesh: TrainingMesh) -> None:
        super().__init__(CubeTraffic(mesh.layout, mesh.coordinates))
        self._mesh = mesh
        self.parts = mesh.layout.tensor_grid.column
        self._place = mesh.coordinates

    def divide_first(self, linear: nn.Linear) -> None:
        self.divide_table(linear, "weight")
        cut_on_grid(linear, "bias", self._mesh, [(0, ROW)], copies="column_tokens")

    def divide_last(self, linear: nn.Linear) -> None:
        cuts = [(0, COLUMN), (1, ROW), (1, DEPTH)]
        cut_on_grid(linear, "weight", self._mesh, cuts, copies="tokens")
        self.divide_between(linear, "bias")

    def divide_table(self, module: nn.Module, name: str) -> None:
        cuts = [(0, ROW), (1, COLUMN), (1, DEPTH)]
        cut_on_grid(module, name, self._mesh, cuts, copies="tokens")

    def divide_between(self, module: nn.Module, name: str) -> None:
        cut_between_layers(module, name, self._mesh)

    def first(self, x: torch.Tensor, linears: Sequence[nn.Linear]) -> list[torch.Tensor]:
        gathered = self._gather_samples(x, ROW)
        return [self._product(gathered, each, COLUMN) for each in linears]

    def last(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        return self._product(self._gather_samples(x, COLUMN), linear, ROW)

    def look_up(
        self, tokens: torch.Tensor, table: torch.Tensor, *, first: int, width: int
    ) -> torch.Tensor:
        begin, count = part_of(len(tokens), self._place[DEPTH], self.parts)
        whole = self._gather_inputs(table, width, COLUMN)
        found = own_rows(tokens[begin : begin + count], whole, first)
        return sum_to_parts(found, self._mesh.group(ROW), dim=0)

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
        _, count = part_of(width, self._place[axis], self.parts)
        return gather_parts(weight, self._mesh.group(DEPTH), dim=1, length=count)

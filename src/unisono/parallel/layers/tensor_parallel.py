"""The interface of all kinds of tensor parallelism, and the choice of a layout's kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from unisono.parallel.divisible.interfaces import MicrobatchPart
from unisono.parallel.layers.tensor_1d import Tensor1D
from unisono.parallel.layers.tensor_2d import Tensor2D
from unisono.parallel.layers.tensor_3d import Tensor3D
from unisono.parallel.training_mesh import TrainingMesh


class TensorParallel(Protocol):
    """The division of a layer's matrices over the ranks of `tp`, with its exchanges.

    A layer has first matrices, which map its input to the inner activation, and a last matrix,
    which maps the inner activation to the output. Activations have the shape (samples, sequence,
    width).
    """

    @property
    def parts(self) -> int:
        """Number of parts into which the inner width is split."""

    def divide_first(self, linear: nn.Linear) -> None:
        """Keeps this rank's block of a first matrix."""

    def divide_last(self, linear: nn.Linear) -> None:
        """Keeps this rank's block of a last matrix."""

    def divide_table(self, module: nn.Module, name: str) -> None:
        """Keeps this rank's block of an embedding table, which is divided like a first matrix."""

    def divide_between(self, module: nn.Module, name: str) -> None:
        """Keeps this rank's part of a parameter between layers, such as the weight of a norm."""

    def first(self, x: torch.Tensor, linears: Sequence[nn.Linear]) -> list[torch.Tensor]:
        """Returns the product of x with each first matrix: an inner activation."""

    def last(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        """Returns the product of x with a last matrix: an activation between layers."""

    def look_up(
        self, tokens: torch.Tensor, table: torch.Tensor, *, first: int, width: int
    ) -> torch.Tensor:
        """Returns the vectors of tokens (samples, sequence), as an activation between layers.

        `table` is this rank's block, which begins at row `first` of the whole table. The whole
        table has vectors of `width` elements.
        """

    def first_elements(self, part: MicrobatchPart, linears: Sequence[nn.Linear]) -> float:
        """Returns the elements that this rank sends for `first`, forward and backward."""

    def last_elements(self, part: MicrobatchPart, linear: nn.Linear) -> float:
        """Returns the elements that this rank sends for `last`, forward and backward."""

    def look_up_elements(self, part: MicrobatchPart, vocab: int, width: int) -> float:
        """Returns the elements that this rank sends for `look_up`, forward and backward.

        `vocab`, `width`: the sizes of the whole table.
        """

    def sum_elements(self, part: MicrobatchPart, count: int) -> float:
        """Returns the elements that this rank sends to sum one number per token over the ranks that
        divide a vector, `count` times."""


def tensor_parallel(mesh: TrainingMesh | None = None) -> TensorParallel:
    """Returns the tensor parallelism (1D, 2D, 2.5D or 3D) of a mesh's layout."""
    kind = mesh.layout.tensor if mesh is not None and mesh.group("tp") is not None else "1d"
    if mesh is None or kind == "1d":
        return Tensor1D(mesh)
    return Tensor3D(mesh) if kind == "3d" else Tensor2D(mesh)

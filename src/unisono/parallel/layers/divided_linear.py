"""Linear layers that tensor parallelism divides by output columns or by input rows."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from unisono.parallel.layers.tensor_exchanges import (
    Group,
    copy_to_all,
    gather_parts,
    sum_of_all,
    sum_to_parts,
)
from unisono.parallel.parameter_block import cut, mark
from unisono.parallel.training_mesh import TrainingMesh

SEQUENCE = 1
"""The dimension of an activation (batch, sequence, width) that sequence parallelism divides."""


class TensorRegion:
    """The entry and the exit of the part of a layer whose matrices are divided.

    Without a mesh, or with one rank on `tp`, both return their argument. With sequence parallelism
    the entry gathers the sequence and the exit scatters it.
    """

    def __init__(self, mesh: TrainingMesh | None = None) -> None:
        self._mesh = mesh
        self.group: Group = mesh.group("tp") if mesh else None
        self.is_sequence_divided = bool(mesh and self.group and mesh.layout.sequence_parallel)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the whole activation, for the divided matrices."""
        if not self.is_sequence_divided:
            return copy_to_all(x, self.group)
        assert self._mesh is not None
        return gather_parts(x, self.group, dim=SEQUENCE, length=self._mesh.sequence)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the ranks' partial results."""
        if not self.is_sequence_divided:
            return sum_of_all(x, self.group)
        return sum_to_parts(x, self.group, dim=SEQUENCE)


def divide_columns(linear: nn.Linear, mesh: TrainingMesh) -> None:
    """Keeps this rank's outputs of a linear layer."""
    for name in ("weight", "bias"):
        cut(linear, name, dim=0, part=mesh.coordinates["tp"], parts=mesh.layout.tp)


def divide_rows(linear: nn.Linear, mesh: TrainingMesh) -> None:
    """Keeps this rank's inputs of a linear layer. The bias stays whole: add it after the sum."""
    cut(linear, "weight", dim=1, part=mesh.coordinates["tp"], parts=mesh.layout.tp)
    mark_between_regions(linear.bias, mesh)


def mark_between_regions(parameter: nn.Parameter | None, mesh: TrainingMesh) -> None:
    """Marks a whole parameter outside the tensor regions.

    With sequence parallelism the ranks of `tp` see different tokens there, so its gradient is
    summed over the whole stage.
    """
    if parameter is not None and mesh.layout.sequence_parallel:
        mark(parameter, summed_over="stage")


def row_linear(linear: nn.Linear, x: torch.Tensor, region: TensorRegion) -> torch.Tensor:
    """Returns the output of a layer whose inputs are divided, and leaves the region."""
    y = region.leave(functional.linear(x, linear.weight))
    return y if linear.bias is None else y + linear.bias

"""Blocks of parameters on planes or a cube of ranks: tensor parallelism in 2D, 2.5D and 3D."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from unisono.parallel.divisible.parameter_block import cut
from unisono.parallel.training_mesh import TrainingMesh

ROW, COLUMN, DEPTH = "tp_row", "tp_column", "tp_depth"


def cut_on_grid(
    module: nn.Module,
    name: str,
    mesh: TrainingMesh,
    cuts: Sequence[tuple[int, str]],
    *,
    copies: str,
) -> None:
    """Keeps this rank's block of a parameter, cut along each (dimension, axis) in turn.

    `copies`: name in `GROUPS` of the group whose ranks hold the same block and see different
    tokens.
    """
    for dim, axis in cuts:
        cut(module, name, mesh, dim=dim, axis=axis, copies=copies)


def cut_between_layers(module: nn.Module, name: str, mesh: TrainingMesh) -> None:
    """Keeps this rank's part of a parameter between layers, such as the weight of a norm.

    Between layers, the width is split along the columns of the grid, and the samples along its
    other axes.
    """
    parameter: nn.Parameter | None = getattr(module, name)
    if parameter is not None:
        cut_on_grid(module, name, mesh, [(parameter.dim() - 1, COLUMN)], copies="row_tokens")

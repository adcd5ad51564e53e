"""The feed-forward network of a transformer layer, whose inner width tensor parallelism divides."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from unisono.parallel.layers.divided_linear import (
    TensorRegion,
    divide_columns,
    divide_rows,
    row_linear,
)
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import Transformer


class FeedForward(nn.Module):
    """Two layers with GELU between, or three with a gate (SwiGLU).

    Shape (batch, sequence, hidden) in and out.
    """

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        has_bias = not shape.gated
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=has_bias)
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False) if shape.gated else None
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=has_bias)
        self._region = TensorRegion()

    def divide(self, mesh: TrainingMesh) -> None:
        """Keeps this rank's part of the inner width; parts may be uneven."""
        if mesh.group("tp") is None:
            return
        divide_columns(self.up, mesh)
        if self.gate is not None:
            divide_columns(self.gate, mesh)
        divide_rows(self.down, mesh)
        self._region = TensorRegion(mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._region.enter(x)
        inner = activate(self.up(x), None if self.gate is None else self.gate(x))
        return row_linear(self.down, inner, self._region)


def activate(up: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """Returns GELU(up), or SiLU(gate) up if there is a gate."""
    return functional.gelu(up) if gate is None else functional.silu(gate) * up

"""Self-attention whose heads tensor parallelism divides, and whose sequence `cp` divides."""

from __future__ import annotations

import torch
from torch import nn

from unisono.parallel.context import ContextAttention
from unisono.parallel.layers.divided_linear import (
    TensorRegion,
    divide_columns,
    divide_rows,
    row_linear,
)
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import Transformer, nearest_divisor


class SelfAttention(nn.Module):
    """Attention with `heads` query heads and `kv_heads` heads of keys and values.

    Shape (batch, sequence, hidden) in and out.
    """

    def __init__(
        self, shape: Transformer, *, is_causal: bool = True, context: str = "ring"
    ) -> None:
        """`context`: how ranks of `cp` exchange keys and values; see `ContextAttention`."""
        super().__init__()
        self.head_dim, self.is_causal, self.context = shape.head_dim, is_causal, context
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        has_bias = not shape.gated
        self.query = nn.Linear(shape.hidden, wide, bias=has_bias)
        self.key = nn.Linear(shape.hidden, narrow, bias=has_bias)
        self.value = nn.Linear(shape.hidden, narrow, bias=has_bias)
        self.output = nn.Linear(wide, shape.hidden, bias=has_bias)
        self._region = TensorRegion()
        self._attend = ContextAttention(context, None)

    def divide(self, mesh: TrainingMesh) -> None:
        """Keeps this rank's heads. Raises `ValueError` if `tp` does not divide the heads."""
        for name, heads in (("heads", self.heads), ("kv_heads", self.kv_heads)):
            if heads % mesh.layout.tp:
                near = nearest_divisor(heads, mesh.layout.tp)
                raise ValueError(
                    f"tp must divide {name}: {mesh.layout.tp} does not divide {heads}; "
                    f"tp = {near} does"
                )
        if mesh.group("tp") is not None:
            for linear in (self.query, self.key, self.value):
                divide_columns(linear, mesh)
            divide_rows(self.output, mesh)
        self._region = TensorRegion(mesh)
        self._attend = ContextAttention(self.context, mesh.group("cp"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._region.enter(x)
        query, key, value = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = self._attend(query, key, value, is_causal=self.is_causal)
        return row_linear(self.output, mixed.transpose(1, 2).flatten(2), self._region)

"""The feed-forward network of a transformer layer; tensor parallelism divides its inner width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from unisono.parallel.divisible.interfaces import ALL_ACTIVATIONS, MicrobatchPart
from unisono.parallel.layers.tensor_parallel import tensor_parallel
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import Transformer


class FeedForward(nn.Module):
    """A network of two linear layers with GELU, or of three linear layers with a gate (SwiGLU).

    Input and output have the shape (batch, sequence, hidden).
    """

    serves = ALL_ACTIVATIONS

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        has_bias = not shape.gated
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=has_bias)
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False) if shape.gated else None
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=has_bias)
        self._tensor = tensor_parallel()

    def divide(self, mesh: TrainingMesh) -> None:
        """Keeps this rank's part of the inner width; the parts may have different sizes."""
        self._tensor = tensor_parallel(mesh)
        for linear in self._firsts():
            self._tensor.divide_first(linear)
        self._tensor.divide_last(self.down)

    def _firsts(self) -> list[nn.Linear]:
        return [self.up] if self.gate is None else [self.up, self.gate]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, *gate = self._tensor.first(x, self._firsts())
        return self._tensor.last(activate(up, gate[0] if gate else None), self.down)

    def bytes_sent(self, parts: Sequence[MicrobatchPart]) -> Mapping[str, float]:
        """Returns the bytes that this rank sends on `tp` in a step; see `Exchanging`."""
        tensor, firsts = self._tensor, self._firsts()
        moved = (
            each.item_bytes
            * (tensor.first_elements(each, firsts) + tensor.last_elements(each, self.down))
            for each in parts
        )
        return {"tp": sum(moved)}


def activate(up: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """Returns GELU(up), or SiLU(gate) up if there is a gate."""
    return functional.gelu(up) if gate is None else functional.silu(gate) * up

"""Layer norm and RMS norm, also of vectors whose elements are split across ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from unisono.parallel.divisible.exchanges import Group, copy_to_all, sum_of_all
from unisono.parallel.divisible.interfaces import ALL_ACTIVATIONS, MicrobatchPart
from unisono.parallel.layers.tensor_parallel import tensor_parallel
from unisono.parallel.training_mesh import TrainingMesh

_LAYER_NORM_EPSILON = 1e-5


class FeatureNorm(nn.Module):
    """Layer norm of vectors (..., width) if `is_centred`; else RMS norm.

    Parameters and results are those of `nn.LayerNorm` or `nn.RMSNorm`.

    >>> x = torch.tensor([[3.0, 4.0]])
    >>> torch.equal(FeatureNorm(2, is_centred=False)(x), nn.RMSNorm(2)(x))
    True
    """

    serves = ALL_ACTIVATIONS

    def __init__(self, width: int, *, is_centred: bool, epsilon: float | None = None) -> None:
        """`epsilon`: added to the mean of squares; None: that of torch's norm by default."""
        super().__init__()
        self._own_epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if is_centred else None
        self._width, self.is_centred = width, is_centred
        self._group: Group = None
        self._tensor = tensor_parallel()

    def divide(self, mesh: TrainingMesh) -> None:
        """Keeps this rank's part of weight and bias, if tensor parallelism splits the width."""
        self._tensor = tensor_parallel(mesh)
        self._tensor.divide_between(self, "weight")
        self._tensor.divide_between(self, "bias")
        if mesh.layout.tensor != "1d":
            self._group = mesh.group("tp_column")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._group is not None:
            return self._of_parts(x)
        if self.is_centred:
            shape = (self._width,)
            return functional.layer_norm(x, shape, self.weight, self.bias, self._epsilon(x))
        return functional.rms_norm(x, (self._width,), self.weight, self._epsilon(x))

    def _of_parts(self, x: torch.Tensor) -> torch.Tensor:
        dtype, epsilon = x.dtype, self._epsilon(x)
        x = x.to(torch.promote_types(dtype, torch.float32))
        if self.is_centred:  # mean(x^2) - mean(x)^2 would lose digits
            x = x - self._mean(x)
        y = x * (self._mean(x.square()) + epsilon).rsqrt() * self.weight
        return (y if self.bias is None else y + self.bias).to(dtype)

    def _epsilon(self, x: torch.Tensor) -> float:
        """Returns the epsilon: that of bfloat16 would be larger than the squares of activations."""
        if self._own_epsilon is not None:
            return self._own_epsilon
        if self.is_centred:
            return _LAYER_NORM_EPSILON
        return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the mean over the whole width. The gradient of the mean is the sum of the ranks'
        gradients, since each rank uses the mean for its own part."""
        total = sum_of_all(x.sum(-1, keepdim=True), self._group)
        return copy_to_all(total, self._group) / self._width

    def bytes_sent(self, parts: Sequence[MicrobatchPart]) -> Mapping[str, float]:
        """Returns the bytes that this rank sends on `tp` in a step; see `Exchanging`."""
        if self._group is None:
            return {}
        count = 4 if self.is_centred else 2  # means of x and of x^2, forward and backward
        return {
            "tp": sum(self._tensor.sum_elements(each, count) * each.wide_bytes for each in parts)
        }

"""Codec of vectors as their largest values and the indices of those values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from unisono.parallel.compression.error_feedback_exchange import GradientCodec

_INDEX = torch.int32


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK(GradientCodec):
    """Sends the largest values of each gradient, with their indices.

    Every rank gathers all messages. With float32 gradients and fewer than 1 / `fraction` ranks,
    these have fewer bytes than an all_reduce; otherwise gradients are sent uncompressed. Source:
    A. F. Aji and K. Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017.

    >>> codec, values = TopK(fraction=0.5), torch.tensor([1.0, -3.0, 0.0, 2.0])
    >>> decoded = torch.zeros(4)
    >>> codec.add_decoded(codec.encode(values), decoded)
    >>> decoded.tolist()
    [0.0, -3.0, 0.0, 2.0]
    """

    fraction: float = 0.01
    """Fraction of each gradient's values that is sent; the number of sent values is rounded up."""
    error_feedback: bool = True
    """True if the values that were not sent are added to the next gradient."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction: expected above 0 and at most 1, got {self.fraction}")

    def message_bytes(self, count: int, itemsize: int) -> int:
        """Returns the size of a message: one value and one index for each kept value."""
        return self.kept(count) * (itemsize + _INDEX.itemsize)

    def kept(self, count: int) -> int:
        """Returns the number of sent values for a vector of `count` values.

        >>> TopK(fraction=0.01).kept(250)
        3
        """
        return min(count, max(1, math.ceil(self.fraction * count)))

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the values of largest magnitude, then their indices. NaN counts as the largest.

        Raises `ValueError` for 2^31 or more values.
        """
        count = values.numel()
        if count > torch.iinfo(_INDEX).max:
            raise ValueError(f"top-k: expected fewer than 2^31 values in a gradient, got {count}")
        # NumPy's selection takes linear time. torch.topk takes three times as long on such vectors.
        order = np.argpartition(values.abs().numpy(), count - self.kept(count))
        indices = torch.from_numpy(np.sort(order[count - self.kept(count) :]))
        kept = values[indices]
        return torch.cat([kept.view(torch.uint8), indices.to(_INDEX).view(torch.uint8)])

    def add_decoded(self, message: torch.Tensor, total: torch.Tensor) -> None:
        """Adds each kept value at its index."""
        values_bytes = self.kept(total.numel()) * total.dtype.itemsize
        values = message[:values_bytes].clone().view(total.dtype)
        indices = message[values_bytes:].clone().view(_INDEX)
        total.index_add_(0, indices, values)

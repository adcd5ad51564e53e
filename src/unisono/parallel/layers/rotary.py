"""Rotary positions: each pair of features of a head turns by an angle that grows with the position.

The product of a query and a key then depends on their distance. Su et al., "RoFormer: enhanced
transformer with rotary position embedding", 2021. Pairs and roundings are those of Llama in
transformers: feature i turns with feature i + head_dim / 2, by rates in float32.
"""

from __future__ import annotations

import torch


def rotated(
    tensors: tuple[torch.Tensor, ...], positions: torch.Tensor, *, base: float
) -> tuple[torch.Tensor, ...]:
    """Returns queries or keys (batch, heads, positions, head_dim), turned by their positions.

    `positions`: int64, in the whole sequence. Pair i of features turns by position x base^(-2 i /
    head_dim).

    >>> x = torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]])
    >>> (found,) = rotated((x,), torch.tensor([0, 1]), base=10000.0)
    >>> [[round(each, 4) for each in row] for row in found[0, 0].tolist()]
    [[1.0, 0.0], [0.5403, 0.8415]]
    """
    width, dtype = tensors[0].shape[-1], torch.promote_types(tensors[0].dtype, torch.float32)
    powers = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    angles = positions.to(dtype).unsqueeze(-1) * (1.0 / base**powers).to(dtype)
    cosines, sines = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    return tuple(x * cosines.to(x.dtype) + _turned(x) * sines.to(x.dtype) for x in tensors)


def _turned(x: torch.Tensor) -> torch.Tensor:
    """Returns each pair of features, turned by a right angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)

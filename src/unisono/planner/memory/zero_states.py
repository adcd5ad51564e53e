"""Exact bytes of weights, gradients and optimizer states with ZeRO."""

from __future__ import annotations

from typing import NamedTuple


class StateBytes(NamedTuple):
    """Bytes of the states on one device."""

    weights: float
    gradients: float
    optimizer: float


def state_bytes(
    parameters: float,
    *,
    zero: int,
    shards: int,
    precision: str = "bf16",
    gradient_bytes: int = 2,
) -> StateBytes:
    """Returns the bytes of the states of `parameters` on one of `shards` devices, with Adam.

    With mixed precision, a parameter has 2 bytes of weight, `gradient_bytes` of gradient and 12
    bytes of optimizer state (a float32 weight and two moments). With fp32, it has 4, 4 and 8 bytes.
    ZeRO divides over the shards the optimizer states (stage 1), also the gradients (stage 2), and
    also the weights (stage 3; Rajbhandari et al., arXiv 1910.02054, table 1).

    >>> [round(sum(state_bytes(7.5e9, zero=z, shards=64)) / 1e9, 2) for z in range(4)]
    [120.0, 31.41, 16.64, 1.88]
    >>> sum(state_bytes(1, zero=1, shards=64, gradient_bytes=4))    # Megatron: 6 + 12 / dp
    6.1875
    """
    whole = precision in ("fp32", "tf32")
    weight, gradient, states = (4, 4, 8) if whole else (2, gradient_bytes, 12)
    return StateBytes(
        parameters * weight / (shards if zero >= 3 else 1),
        parameters * gradient / (shards if zero >= 2 else 1),
        parameters * states / (shards if zero >= 1 else 1),
    )

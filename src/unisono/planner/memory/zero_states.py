"""Exact bytes of weights, gradients and optimizer states with ZeRO."""

from __future__ import annotations

from typing import NamedTuple

from unisono.planner.inputs.workload import EAGER, MEGATRON_CORE


class StateBytes(NamedTuple):
    """Bytes of the states on one device."""

    weights: float
    gradients: float
    optimizer: float


def gradient_bytes(software: str, precision: str) -> int:
    """Returns the bytes in which software holds the gradient of a parameter by default.

    Megatron-LM of 2021 and 2022 holds 16 bits with fp16, and float32 with bf16
    (`accumulate_allreduce_grads_in_fp32`). Megatron-Core holds 16 bits (`grad_reduce_in_fp32` of
    `DistributedDataParallelConfig` is False, as in the performance recipes of NeMo and
    Megatron-Bridge). torch-fsdp sums gradients in float32.

    >>> gradient_bytes("megatron-2021", "bf16"), gradient_bytes("transformer-engine", "bf16")
    (4, 2)
    """
    narrow = software in MEGATRON_CORE or (software in EAGER and precision == "fp16")
    return 2 if narrow else 4


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

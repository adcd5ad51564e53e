"""Exact bytes of weights, gradients and optimizer states with ZeRO."""

from __future__ import annotations

from typing import NamedTuple

from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.workload import HIDDEN_EXPERTS, Workload


class StateBytes(NamedTuple):
    """Bytes of the states on one device."""

    weights: float
    gradients: float
    optimizer: float


def gradient_bytes(job: Workload, layout: Layout) -> int:
    """Returns the bytes in which software holds the gradient of a parameter.

    bf16 gradients are summed in float32 by Megatron (`accumulate_allreduce_grads_in_fp32` of
    Megatron-LM, `grad_reduce_in_fp32` of Megatron-Bridge) and by PyTorch. fp16 gradients stay in 16
    bits. Megatron-DeepSpeed holds bf16 gradients beside their float32 sums (`BF16_Optimizer`).
    megatron-2025 and megatron-2026 are the software of performance recipes, whose gradients have 16
    bits (`grad_reduce_in_fp32=False` in those of Megatron-Bridge).

    >>> job, narrow = (Workload(seq=1, global_batch=1, precision=name) for name in ("bf16", "fp16"))
    >>> gradient_bytes(job, Layout()), gradient_bytes(narrow, Layout())
    (4, 2)
    """
    software = job.software_of(layout)
    if job.precision in ("fp32", "tf32"):
        return 4
    if job.states != "mixed" or software in HIDDEN_EXPERTS or job.precision == "fp16":
        return 2
    return 6 if software == "megatron-deepspeed" else 4


def state_bytes(
    parameters: float,
    *,
    zero: int,
    shards: int,
    precision: str = "bf16",
    gradient_bytes: int = 2,
    narrow: bool = False,
) -> StateBytes:
    """Returns the bytes of the states of `parameters` on one of `shards` devices, with Adam.

    With mixed precision, a parameter has 2 bytes of weight, `gradient_bytes` of gradient and 12
    bytes of optimizer state (a float32 weight and two moments). With fp32, it has 4, 4 and 8 bytes,
    and with `narrow` 2, 2 and 4 bytes. ZeRO divides over the shards the optimizer states
    (stage 1), also the gradients (stage 2), and also the weights (stage 3; Rajbhandari et al.,
    arXiv 1910.02054, table 1).

    >>> [round(sum(state_bytes(7.5e9, zero=z, shards=64)) / 1e9, 2) for z in range(4)]
    [120.0, 31.41, 16.64, 1.88]
    >>> sum(state_bytes(1, zero=1, shards=64, gradient_bytes=4))    # Megatron: 6 + 12 / dp
    6.1875
    """
    whole = precision in ("fp32", "tf32")
    weight, gradient, moments = (4, 4, 8) if whole else (2, gradient_bytes, 12)
    if narrow:
        weight, gradient, moments = 2, 2, 4
    return StateBytes(
        parameters * weight / (shards if zero >= 3 else 1),
        parameters * gradient / (shards if zero >= 2 else 1),
        parameters * moments / (shards if zero >= 1 else 1),
    )

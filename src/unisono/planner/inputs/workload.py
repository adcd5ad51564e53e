"""A workload: the sequences, precision and recomputation of one training step."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.planner.inputs.whole_numbers import whole_number

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
LOW_PRECISIONS = ("fp8", "fp4")
"""Formats under 16 bits, which scale their values in several ways."""
RECOMPUTE = ("none", "selective", "full")
EAGER = ("megatron-2021", "megatron-2022")
"""Megatron-LM before fused attention (fp16): without overlap until August 2021, then with
tensor-parallel exchanges of the backward pass behind the products of weight gradients."""
MEGATRON_CORE = ("transformer-engine", "megatron-2026")
"""Megatron-Core with Transformer Engine; in 2026 with the whole step in one CUDA graph and with
expert exchanges behind compute."""
SOFTWARE = (*EAGER, *MEGATRON_CORE, "torch-fsdp", "torch-2023")
"""Software whose times the planner predicts: Megatron-LM, Megatron-Core, PyTorch's fully sharded
data parallelism, and the same with the first generation of fused attention (FlashAttention 1, until
2023)."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step: sequences, their length, precision and recomputation.

    For a value of None, the planner chooses the fastest value that fits in memory. Raises
    ValueError for values that cannot exist.

    >>> Workload(seq=2048, global_batch=1536, micro_batch=1, recompute="full").tokens
    3145728
    """

    seq: int
    """Number of tokens in a sequence."""
    global_batch: int
    """Number of sequences in a step, over all devices."""
    micro_batch: int | None = None
    """Number of sequences in a microbatch, for each data-parallel rank."""
    precision: str = "bf16"
    """Type of the matrix products: fp32, tf32, fp16, bf16, fp8 or fp4."""
    recompute: str | None = None
    """Activations that backward computes again: none, selective (attention), full (layers)."""
    software: str | None = None
    """One of `SOFTWARE`. None: megatron-2021 for fp16, torch-fsdp for ZeRO-2 and 3, else
    transformer-engine."""

    def __post_init__(self) -> None:
        for name in ("seq", "global_batch", "micro_batch"):
            value = getattr(self, name)
            if value is not None or name != "micro_batch":
                object.__setattr__(self, name, whole_number(name, value))
        if self.micro_batch is not None and self.micro_batch > self.global_batch:
            raise ValueError(
                f"micro_batch must be between 1 and global_batch = {self.global_batch}, not "
                f"{self.micro_batch}"
            )
        for name, known in (
            ("precision", PRECISIONS),
            ("recompute", (*RECOMPUTE, None)),
            ("software", (*SOFTWARE, None)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(str, known))}, not "
                    f"{getattr(self, name)!r}"
                )

    def software_of(self, zero: int) -> str:
        """Returns the software of a layout with this ZeRO stage."""
        if self.software is not None:
            return self.software
        if self.precision == "fp16":
            return "megatron-2021"
        return "torch-fsdp" if zero >= 2 else "transformer-engine"

    @property
    def tokens(self) -> int:
        """Number of tokens in a step, over all devices."""
        return self.seq * self.global_batch

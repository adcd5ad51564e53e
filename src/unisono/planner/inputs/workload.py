"""A workload: the sequences, precision and recomputation of one training step."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.lora import Lora
from unisono.planner.inputs.whole_numbers import switch, whole_number

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
LOW_PRECISIONS = ("fp8", "fp4")
"""Formats under 16 bits, which scale their values in several ways."""
RECOMPUTE = ("none", "selective", "full")
CONTEXT_KINDS = ("ring", "ulysses", "allgather")
"""Kinds of context parallelism, as in `unisono.parallel`: keys and values travel around a ring
behind attention; all_to_all exchanges give each rank all positions of some heads (arXiv
2309.14509); or each rank gathers all keys and values before attention (Llama 3)."""
MEGATRON_LM = ("megatron-2021", "megatron-2022")
"""Megatron-LM before fused attention (fp16): without overlap until August 2021, then with
tensor-parallel exchanges of the backward pass behind the products of weight gradients."""
EAGER = (*MEGATRON_LM, "megatron-deepspeed")
"""Megatron-LM before fused attention, and its fork for DeepSpeed, which is slower."""
HIDDEN_EXPERTS = ("megatron-2025", "megatron-2026")
"""Megatron-Core with expert exchanges behind the compute of another microbatch
(`overlap_moe_expert_parallel_comm`); in 2026 also with the whole step in one CUDA graph."""
MEGATRON_CORE = ("transformer-engine", *HIDDEN_EXPERTS)
"""Megatron-Core with Transformer Engine."""
SUMMING_PRODUCTS = ("megatron-2022", *MEGATRON_CORE)
"""Software whose products of weight gradients add to the sums over microbatches."""
TORCH_FSDP = ("torch-fsdp", "torch-eager")
"""PyTorch's fully sharded data parallelism with torch.compile, and the same without it."""
SOFTWARE = (*EAGER, *MEGATRON_CORE, *TORCH_FSDP, "torch-2023")
"""Software whose times the planner predicts: Megatron-LM, its fork for DeepSpeed, Megatron-Core,
PyTorch's fully sharded data parallelism with and without torch.compile, and the same with the first
generation of fused attention (FlashAttention 1, until 2023)."""

STATES = ("mixed", "bf16-gradients", "bf16")
"""Formats of weights, gradients and optimizer states. mixed: 16 bits, with float32 sums of
gradients (16 bits with fp16), and float32 copies of weights and moments. bf16-gradients: the same
with gradients of 16 bits, as in performance recipes of NeMo and Megatron-Bridge. bf16: all in 16
bits (torchtune, and the defaults of NeMo AutoModel)."""


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
    """One of `SOFTWARE`. None: current software (`software_of`)."""
    trainable: str = "all"
    """Weights that the step trains: "all"; or with "lora:16" only adapters (LoRA) of rank 16 on all
    linear layers; or with "lora:16:attention" only those on the linear layers of attention."""
    document: int | None = None
    """Mean number of tokens of the documents that are packed into a sequence, whose tokens attend
    only to their own document. None: a sequence is one document."""
    offload: bool = False
    """True if the optimizer states are in the host's memory, and the host's processors update
    them."""
    context: str = "ring"
    """Kind of context parallelism: one of `CONTEXT_KINDS`."""
    padding: float = 0.0
    """Share of the positions of a step that are padding. They take as much time as tokens."""
    states: str = "mixed"
    """Formats of weights, gradients and optimizer states: one of `STATES`."""

    def __post_init__(self) -> None:
        for name in ("seq", "global_batch", "micro_batch", "document"):
            value = getattr(self, name)
            if value is not None or name in ("seq", "global_batch"):
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
            ("context", CONTEXT_KINDS),
            ("states", STATES),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(str, known))}, not "
                    f"{getattr(self, name)!r}"
                )

        object.__setattr__(self, "offload", switch("offload", self.offload))
        if not 0 <= self.padding < 1:
            raise ValueError(f"padding is a share from 0 to less than 1, not {self.padding}")
        if self.document is not None and self.document > self.seq:
            raise ValueError(
                f"document must be at most seq = {self.seq}, not {self.document}: longer documents "
                "are cut into sequences"
            )
        Lora.of(self.trainable)

    @property
    def lora(self) -> Lora | None:
        """The adapters that the step trains; None if it trains all weights."""
        return Lora.of(self.trainable)

    def software_of(self, layout: Layout) -> str:
        """Returns the software of a layout.

        If `software` is None, it is current software: torch-fsdp for ZeRO-2 and 3, and
        transformer-engine for other layouts.

        >>> job = Workload(seq=2048, global_batch=8)
        >>> job.software_of(Layout(tp=8)), job.software_of(Layout(dp=8, zero=3))
        ('transformer-engine', 'torch-fsdp')
        """
        if self.software is not None:
            return self.software
        return "torch-fsdp" if layout.zero >= 2 else "transformer-engine"

    @property
    def tokens(self) -> int:
        """Number of tokens in a step, over all devices, without padding."""
        return round(self.seq * self.global_batch * (1 - self.padding))

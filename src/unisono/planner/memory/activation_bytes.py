"""Bytes of the activations that one layer keeps for backward.

For a GPT with the unfused attention of megatron-2021 this is table 2 of Korthikanti et al. (arXiv
2205.05198), for b sequences of length s, width h, a heads and t tensor-parallel ranks:
s b h (10 + 24 / t + 5 a s / (h t)), with sequence parallelism s b h / t (34 + 5 a s / h). The other
software differs:

- Fused attention keeps one float32 of each head and position instead of the 5 a s term.
- With `recompute="selective"`, unfused attention drops that term. transformer-engine drops the
  outputs of norms and activations. torch-fsdp keeps the input, the output of attention and every
  second matrix product, as torchtitan does.
- With fp8 and fp4, transformer-engine keeps the inputs of matrix products in 8 bits.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import EAGER, LOW_PRECISIONS, MEGATRON_CORE, TORCH_FSDP


def layer_activation_bytes(
    model: Transformer,
    *,
    seq: int,
    batch: int,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    software: str = "megatron-2021",
    precision: str = "bf16",
    experts: bool = False,
) -> float:
    """Returns the bytes of one layer and microbatch on one device, in 16-bit values.

    `experts` is True for a layer with experts.

    >>> gpt = Transformer(layers=96, hidden=12288, heads=96, vocab=51200)
    >>> layer_activation_bytes(gpt, seq=2048, batch=1, tp=8) / (2048 * 12288)
    23.0
    """
    tokens = seq * batch / cp
    stream = tokens / (tp if sequence_parallel else 1)
    if recompute == "full":
        return 2 * model.hidden * stream
    if recompute == "selective" and software in TORCH_FSDP:
        return _alternate_products(model, tokens, stream, tp, experts)
    widths = _value_bytes(software, precision, recompute)
    unfused = software in EAGER
    attention = _scores(model, tokens / tp, seq, recompute, unfused)
    projections = model.query_width + model.key_value_width + _output_width(model)
    attention += 2 * tokens / tp * projections
    both = _norms(model, stream, widths, unfused) + attention
    kept = widths.output
    if model.gated and software == "torch-eager":
        kept += 2  # the output of the activation function, beside its product with the gate
    if not experts:
        return both + tokens / tp * _ffn_bytes(model, model.ffn, kept)
    routed = tokens / (tp if sequence_parallel or ep == 1 else 1) * model.top_k
    return both + _experts(model, stream, tokens / tp, routed, widths, kept)


class _ValueBytes(NamedTuple):
    """Bytes of one value that is kept for backward.

    `input` is for inputs of matrix products. `output` is for outputs of norms and activations, and
    is 0 if backward computes them again.
    """

    input: int
    output: int


def _value_bytes(software: str, precision: str, recompute: str) -> _ValueBytes:
    narrow = software in MEGATRON_CORE and precision in LOW_PRECISIONS
    width = 1 if narrow else 2
    again = recompute == "selective" and software not in EAGER
    return _ValueBytes(input=width, output=0 if again else width)


def _norms(model: Transformer, stream: float, widths: _ValueBytes, unfused: bool) -> float:
    """Returns the bytes of the inputs of both norms, the inputs of both blocks, and the masks of
    dropout.
    """
    masks = 2 * model.hidden if unfused and not model.gated else 0
    return stream * ((4 + 2 * widths.output) * model.hidden + masks)


def _output_width(model: Transformer) -> int:
    return model.heads * model.head_dim


def _experts(
    model: Transformer,
    stream: float,
    tokens: float,
    routed: float,
    widths: _ValueBytes,
    kept: int,
) -> float:
    """Returns the bytes of the router, the shared experts and the routed experts."""
    width = _ffn_bytes(model, model.expert_ffn, kept)
    shared = tokens * model.shared_experts * width
    router = 8 * stream * model.experts
    return shared + routed * (width + widths.input * model.hidden) + router


def _scores(model: Transformer, tokens: float, seq: int, recompute: str, unfused: bool) -> float:
    if not unfused:
        return 4 * tokens * model.heads
    return 0.0 if recompute == "selective" else 5 * tokens * model.heads * seq


def _ffn_bytes(model: Transformer, inner: int, kept: int) -> float:
    """Returns the bytes that a feed-forward network keeps for one token.

    These are the inputs of the activation function in 16 bits, and its output with `kept` bytes for
    each value.
    """
    return (2 * (model.matrices - 1) + kept) * inner


def _alternate_products(
    model: Transformer, tokens: float, stream: float, tp: int, experts: bool
) -> float:
    inner = model.expert_ffn * model.top_k if experts else model.ffn
    products = model.query_width + model.key_value_width + (model.matrices - 1) * inner
    # Only every second matrix product is kept, with 2 bytes for each value. On average, that is 1
    # byte for each value of all products. The output of attention is kept too.
    kept = products + 2 * _output_width(model)
    return 2 * stream * model.hidden + tokens / tp * kept + 2 * stream * model.hidden

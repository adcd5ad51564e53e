"""Known models by name, and models of files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.planner.inputs.hugging_face import from_hugging_face
from unisono.planner.inputs.transformer import Transformer
from unisono.text_files import reading


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 51200) -> Transformer:
    return Transformer(layers=layers, hidden=hidden, heads=heads, vocab=vocab, positions=2048)


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int
) -> Transformer:
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        gated=True,
        tied=False,
    )


def _experts(
    layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, **sizes: Any
) -> Transformer:
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        gated=True,
        tied=False,
        **sizes,
    )


_HEAD_NORMS = 2 * 128
"""Elements of the norms of the queries and keys of each head (Qwen3)."""
_DEEPSEEK = Transformer(
    layers=61,
    hidden=7168,
    heads=128,
    head_dim=128,
    ffn=18432,
    gated=True,
    vocab=129280,
    experts=256,
    top_k=8,
    expert_ffn=2048,
    shared_experts=1,
    dense_layers=3,
    expert_groups=8,
    token_groups=4,
    query_rank=1536,
    kv_rank=512,
    rope_dim=64,
    tied=False,
)

# Sources: arXiv 2104.04473 table 1 and 2205.05198 table 3 (gpt3-1.7b to gpt3-1t, vocabulary padded
# to 51,200), and the config.json files of the models' authors (all others).
PRESETS: Mapping[str, Transformer] = {
    "gpt2-1.5b": Transformer(layers=48, hidden=1600, heads=25, vocab=50257, positions=1024),
    "gpt3-1.7b": _gpt(24, 2304, 24),
    "gpt3-3.6b": _gpt(30, 3072, 32),
    "gpt3-7.5b": _gpt(36, 4096, 32),
    "gpt3-18b": _gpt(40, 6144, 48),
    "gpt3-22b": _gpt(48, 6144, 64),
    "gpt3-39b": _gpt(48, 8192, 64),
    "gpt3-76b": _gpt(60, 10240, 80),
    "gpt3-145b": _gpt(80, 12288, 96),
    "gpt3-175b": _gpt(96, 12288, 96),
    "gpt3-310b": _gpt(96, 16384, 128),
    "gpt3-530b": _gpt(105, 20480, 128),
    "gpt3-1t": _gpt(128, 25600, 160),
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": _llama(126, 16384, 128, 8, 53248, 128256),
    "mixtral-8x7b": _experts(32, 4096, 32, 8, 32000, experts=8, top_k=2, expert_ffn=14336),
    "mixtral-8x22b": _experts(56, 6144, 48, 8, 32768, experts=8, top_k=2, expert_ffn=16384),
    "qwen3-30b-a3b": _experts(
        *(48, 2048, 32, 4, 151936),
        head_dim=128,
        experts=128,
        top_k=8,
        expert_ffn=768,
        layer_vectors=2 * 2048 + _HEAD_NORMS,
    ),
    "qwen3-235b-a22b": _experts(
        *(94, 4096, 64, 4, 151936),
        head_dim=128,
        experts=128,
        top_k=8,
        expert_ffn=1536,
        layer_vectors=2 * 4096 + _HEAD_NORMS,
    ),
    "gpt-oss-120b": _experts(
        *(36, 2880, 64, 8, 201088),
        head_dim=64,
        experts=128,
        top_k=4,
        expert_ffn=2880,
        # Norms; biases of attention's products and of the router; an attention sink for each head.
        layer_vectors=2 * 2880 + (64 + 2 * 8) * 64 + 2880 + 128 + 64,
        expert_vectors=3 * 2880,
    ),
    "deepseek-v3": _DEEPSEEK,
}


def model_named(name: str) -> Transformer:
    """Returns a known model. Raises ValueError for an unknown name, with the nearest names.

    >>> model_named("llama3-8b").kv_heads
    8
    >>> model_named("lama3-8b")
    Traceback (most recent call last):
    ValueError: no model is named 'lama3-8b'; near: llama3-8b, llama3-70b, llama3-405b
    """
    found = PRESETS.get(name.lower())
    if found is None:
        import difflib

        near = difflib.get_close_matches(name.lower(), PRESETS, cutoff=0.3)
        raise ValueError(f"no model is named {name!r}; near: {', '.join(near or PRESETS)}")
    return found


def load_model(what: str | Path) -> Transformer:
    """Returns a known model by name, or the model of a Hugging Face `config.json`.

    Raises ValueError for an unknown name and for a file without the sizes of a transformer.

    >>> load_model("gpt3-175b").layers
    96
    """
    path = Path(what)
    if path.suffix != ".json":
        return model_named(str(what))
    with reading(path) as text:
        return from_hugging_face(json.loads(text))

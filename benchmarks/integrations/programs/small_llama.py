"""A small Llama with random weights, as a checkpoint that vLLM reads without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = 1024
"""Number of tokens of the model."""


def config(**changes: Any) -> LlamaConfig:
    """Returns a model of 4 layers, whose heads divide among up to 4 ranks."""
    sizes = {
        "vocab_size": WORDS, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    return LlamaConfig(**{**sizes, **changes}, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def model(seed: int, **changes: Any) -> LlamaForCausalLM:
    """Returns the model with the weights of a seed. They are large, so that the best of all words
    stands out."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config(initializer_range=0.2, **changes)).to(torch.bfloat16)


def save(folder: Path, seed: int = 0, **changes: Any) -> str:
    """Saves the model of a seed in a folder and returns its path."""
    model(seed, **changes).save_pretrained(folder)
    return str(folder)


def options(ranks: int) -> dict[str, Any]:
    """Returns vLLM's options for the model on the ranks of this host."""
    return {
        "skip_tokenizer_init": True, "tensor_parallel_size": ranks, "dtype": "bfloat16",
        "distributed_executor_backend": "mp", "max_model_len": 256, "max_num_seqs": 16,
        "kv_cache_memory_bytes": 2**26, "enable_prefix_caching": False,
    }  # fmt: skip


def prompts(number: int) -> list[dict[str, list[int]]]:
    """Returns prompts of 8 tokens each."""
    return [
        {"prompt_token_ids": [(37 * each + 11 * place) % (WORDS - 3) + 3 for place in range(8)]}
        for each in range(number)
    ]

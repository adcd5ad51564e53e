"""Ranks train a small Llama in a layout and export it: `exported_llama.py FOLDER LAYOUT TIED`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional

import unisono

VOCAB = 61
BATCHES = [
    torch.randint(0, VOCAB, (4, 9), generator=torch.Generator().manual_seed(k)) for k in (1, 2)
]


def llama(*, tied: bool) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        tie_word_embeddings=tied, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def loss_of(output: Any, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    logits = output.logits.flatten(0, 1)
    return functional.cross_entropy(logits, targets.flatten(), reduction="sum"), targets.numel()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


def train_and_export(folder: Path, text: str, *, tied: bool) -> None:
    from torch import distributed as dist

    from unisono import parallel

    dist.init_process_group("unisono")
    run = parallel.parallelize(
        llama(tied=tied), parallel.Layout.parse(text), loss=loss_of, optimizer=adam
    )
    for batch in BATCHES:
        run.step(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
    run.export(folder)
    other = parallel.parallelize(
        llama(tied=tied), parallel.Layout(dp=2, zero=1), loss=loss_of, optimizer=adam
    )
    other.load_weights(folder)
    again = folder.with_name("again")
    other.export(again)
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, text, tied = sys.argv[1:]
    unisono.run(partial(train_and_export, Path(folder), text, tied=tied == "tied"), ranks=2)

"""Layouts of three ranks, which divide no size evenly. Training equals training in one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from parallel.worlds.layout_training import (
    compare_model,
    compare_transformer,
    expert_shape,
    small_shape,
    token_batches,
)
from unisono.parallel import TransformerModel

pytestmark = pytest.mark.torch
RANKS = 3
BACKENDS = ("unisono",)
HEADS = {"heads": 6, "kv_heads": 3}


def test_layouts_3(outcome):
    outcome.require_success()


class Scale(nn.Module):
    """Scales its input by a parameter of one element."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x):
        return x * self.factor


def narrow_model():
    """Returns a model whose parameters have first dimensions of 1, 2, 7 and 10."""
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(6, 10), nn.Tanh(), Scale(), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 2)
    )


def own_short_and_uneven_dimensions(world):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(6)
    batches = [(torch.randn(8, 6), torch.randn(8, 2)) for _ in range(3)]
    for text in ("dp=3", "dp=3,zero=1", "dp=3,zero=2", "dp=3,zero=3"):
        compare_model(text, narrow_model, lambda: nn.functional.mse_loss, batches, microbatches=2)
    other = ("tp",)  # pairs of nn.Linear have no closed form
    compare_model("tp=3", narrow_model, lambda: nn.functional.mse_loss, batches, unpredicted=other)


def own_uneven_widths(world):
    # parts of 3, 3 and 1 rows, 4, 4 and 2 rows, and 3, 3 and 1 words of the vocabulary
    compare_transformer("tp=3", ffn=7, vocab=7, **HEADS)
    compare_transformer(
        "tp=3,sequence_parallel=1", positions=10, ffn=10, gated=True, tied=False, **HEADS
    )


def own_loss_of_gathered_logits(world):
    """Tests a loss that needs the logits of all words. The ranks have 4, 4 and 3 words."""

    def loss(logits, targets):
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    shape = small_shape(**HEADS)
    model = partial(TransformerModel, shape, seed=1)
    compare_model("tp=3", model, lambda: loss, token_batches(shape))


def own_uneven_shards(world):
    compare_transformer("dp=3,zero=1", microbatches=2)
    compare_transformer("dp=3,zero=3", microbatches=2, hidden=20, tied=False)


def own_experts_of_ranks_without_samples(world):
    # the microbatches have 2 samples and 1 sample
    samples = {"samples": 3, "microbatches": 2}
    compare_transformer("dp=3,ep=3", **samples, **expert_shape(experts=6))
    compare_transformer(
        "dp=3,zero=1", **samples, capacity_factor=0.8, dropout=0.2, **expert_shape()
    )
    compare_transformer("dp=3,zero=3", **samples, **expert_shape(shared_experts=0))


def own_context(world):
    compare_transformer("cp=3,zero=1")
    compare_transformer("cp=3", context="ulysses", is_causal=False, **HEADS)


def own_pipeline(world):
    compare_transformer("pp=3", microbatches=3, samples=6)
    compare_transformer("pp=3,schedule=zb1p", microbatches=6, samples=6)

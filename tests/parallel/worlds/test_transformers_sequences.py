"""Models of transformers whose sequences are divided (`cp`): equal to one process."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from torch import nn
from torch.nn import functional

from cases_in_turn import turn
from parallel.worlds.sequence_models import compare_sequences
from unisono.parallel import model_loss

pytestmark = [pytest.mark.torch, pytest.mark.optional]
RANKS = 2
BACKENDS = ("unisono",)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61,
         "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": GROUPED,
    "Qwen3ForCausalLM": GROUPED,
    "MistralForCausalLM": {**GROUPED, "sliding_window": 5},
    "Gemma3ForCausalLM": {**GROUPED, "sliding_window": 5,
                          "layer_types": ["sliding_attention", "full_attention"]},
    "GPT2LMHeadModel": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "BertForMaskedLM": WITHOUT_DROPOUT,
}  # fmt: skip
TOLERANCE = 1e-10
OWN_TOLERANCE = 1e-6
"""The losses of transformers round logits to float32."""


def test_transformers_sequences(outcome):
    outcome.require_success()


def a_model(kind: str) -> nn.Module:
    """Returns a model without roundings to float32, which its norms would make."""
    torch.manual_seed(0)
    name = kind.partition("For")[0].replace("LMHeadModel", "")
    config_name = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    config = getattr(transformers, config_name)(**SIZES, **KINDS[kind])
    model = getattr(transformers, kind)(config).train()
    for each in model.modules():
        if type(each).__name__.endswith("RMSNorm"):
            each.forward = RoundingFree(each)
    return model


class RoundingFree:
    """The forward of a norm, in the type of its inputs."""

    def __init__(self, norm: nn.Module) -> None:
        self.shift = 1.0 if type(norm).__name__.startswith("Gemma") else 0.0
        self.norm = norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        eps = getattr(self.norm, "variance_epsilon", None) or self.norm.eps
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return x * scale * (self.norm.weight + self.shift)


def batches(kind: str, *, masked: bool) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(5):
        ids = torch.randint(0, 61, (4, 16), generator=generator)
        labels = ids.clone()
        labels[0, 3:], labels[2:, :4] = -100, -100
        batch = {"input_ids": ids, "labels": labels}
        if masked:
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][1, 11:] = 0
        found.append(batch)
    return found


def logits_of(model: nn.Module, batch: Any) -> torch.Tensor:
    mask = {name: batch[name] for name in ("attention_mask",) if name in batch}
    return model(input_ids=batch["input_ids"], use_cache=False, **mask).logits


def loss_of(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def compare(kind: str, text: str, *, masked: bool, microbatches: int = 1) -> float:
    """Trains on labels of their own positions, in float64."""
    torch.set_default_dtype(torch.float64)
    return compare_sequences(
        text, lambda: a_model(kind), batches(kind, masked=masked),
        alone=lambda model, batch: loss_of(logits_of(model, batch), batch),
        loss=loss_of, call=logits_of, microbatches=microbatches, tolerance=TOLERANCE,
    )  # fmt: skip


def compare_own(kind: str, text: str, *, masked: bool) -> float:
    """Trains on the loss of the model."""
    torch.set_default_dtype(torch.float64)
    return compare_sequences(
        text, lambda: a_model(kind), batches(kind, masked=masked), loss=model_loss,
        tolerance=OWN_TOLERANCE, weights_tolerance=1e-4,
    )  # fmt: skip


def own_models(world):
    for kind in KINDS:
        for text, masked in (("cp=2", False), ("cp=2,zero=3", True)):
            with turn(kind=kind, text=text):
                compare(kind, text, masked=masked, microbatches=2)


def own_losses_of_models(world):
    for kind in KINDS:
        with turn(kind=kind):
            compare_own(kind, "cp=2", masked=kind == "LlamaForCausalLM")

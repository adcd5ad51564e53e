"""Models of transformers without a `tp_plan`, whose styles are known by their class, divided over
`tp` and equal to one process in float64."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from cases_in_turn import turn
from parallel.worlds.test_transformers_plans import NO_DROPOUT, TEXT, compare
from unisono.parallel.tensor_plan.default_styles import BY_CLASS

pytestmark = [pytest.mark.torch, pytest.mark.optional]
RANKS = 4
BACKENDS = ("unisono",)
SIZES = {"vocab_size": 61, "max_position_embeddings": 32, "pad_token_id": 0}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
ENCODER = TEXT | NO_DROPOUT | SIZES
DECODER = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "ffn_dim": 48,
           "dropout": 0.0, "attention_dropout": 0.0} | SIZES  # fmt: skip
TRANSLATOR = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0,
              "encoder_attention_heads": 4, "decoder_attention_heads": 4,
              "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "attention_dropout": 0.0,
              "activation_dropout": 0.0, "decoder_start_token_id": 2} | SIZES  # fmt: skip
IMAGE = {"hidden_size": 32, "intermediate_size": 48, "image_size": 8, "num_hidden_layers": 2,
         "num_attention_heads": 4, "patch_size": 4, "num_labels": 5} | NO_DROPOUT  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "RobertaForMaskedLM": ENCODER,
    "ElectraForMaskedLM": ENCODER | {"embedding_size": 16},
    "DistilBertForMaskedLM": SIZES
    | {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    | {"dropout": 0.0, "attention_dropout": 0.0},
    "ModernBertForMaskedLM": TEXT | SIZES | TOKENS,
    "OPTForCausalLM": DECODER | {"word_embed_proj_dim": 32},
    "BioGptForCausalLM": ENCODER | {"activation_dropout": 0.0, "layerdrop": 0.0},
    "GPTNeoForCausalLM": SIZES
    | {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4}
    | {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "BartForConditionalGeneration": TRANSLATOR,
    "PegasusForConditionalGeneration": TRANSLATOR,
    "DeiTForImageClassification": IMAGE,
    "Dinov2ForImageClassification": IMAGE | {"mlp_ratio": 2},
}


def test_transformers_styles(outcome):
    outcome.require_success()


def own_models(world):
    for kind, sizes in MODELS.items():
        with turn(kind=kind):
            compare(kind, "dp=2,tp=2", microbatches=2, **sizes)


def test_every_tested_model_has_a_form():
    for kind in MODELS:
        assert f"{kind.partition('For')[0]}Model" in BY_CLASS

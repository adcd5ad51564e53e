"""Models of transformers in layouts of three and four axes: equal to one process in float64.

`benchmarks/model_layouts.py` compares more models and layouts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("transformers")

from cases_in_turn import turn
from parallel.worlds.sequence_models import compare_sequences
from parallel.worlds.test_transformers_experts import MODELS
from parallel.worlds.test_transformers_plans import a_model, in_float64
from parallel.worlds.test_transformers_sequences import batches

pytestmark = [pytest.mark.torch, pytest.mark.optional]
RANKS = 8
BACKENDS = ("unisono",)
EXPERTS = {"experts_implementation": "eager"}


def test_transformers_mixtures(outcome):
    outcome.require_success()


@in_float64()
def compare(kind: str, text: str, **options: Any) -> None:
    data = batches(kind, masked=True)
    with turn(kind=kind, text=text):
        compare_sequences(
            text,
            partial(a_model, kind, **options),
            data,
            microbatches=2,
            example=data[0] if "pp=" in text else None,
        )


def own_dense_models(world):
    compare("LlamaForCausalLM", "cp=2,tp=2,pp=2")
    compare("Gemma3ForCausalLM", "dp=2,cp=2,tp=2,zero=3")
    compare("GPT2LMHeadModel", "cp=2,tp=2,pp=2,schedule=zb1p")
    compare("BertForMaskedLM", "dp=2,cp=2,pp=2,zero=3")


def own_mixtures_of_experts(world):
    compare("MixtralForCausalLM", "dp=2,cp=2,tp=2,ep=4,zero=1", **EXPERTS)
    for kind, text in (
        ("DeepseekV3ForCausalLM", "cp=2,tp=2,pp=2,ep=4"),
        ("GptOssForCausalLM", "dp=2,cp=2,pp=2,ep=2,zero=3"),
    ):
        compare(kind, text, **MODELS[kind] | EXPERTS)

"""A Llama as a `TransformerModel`, with rotary positions, in all layouts of four ranks."""

from __future__ import annotations

import pytest

from cases_in_turn import turn
from parallel.worlds.layout_training import compare_model, small_shape, token_batches
from unisono.parallel import CrossEntropy, TransformerModel

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)


def test_rotary_layouts(outcome):
    outcome.require_success()


def compare(text: str, *, microbatches: int = 2, context: str = "ring") -> None:
    sizes = {"layers": 2, "kv_heads": 2, "head_dim": 6, "ffn": 20, "gated": True, "tied": False}
    batches = token_batches(small_shape(**sizes))
    shape = small_shape(**sizes, positions=0)
    compare_model(
        text,
        lambda: TransformerModel(
            shape, seed=1, rotary_base=100.0, norm_epsilon=1e-4, context=context
        ),
        lambda: CrossEntropy(shape.vocab),
        batches,
        microbatches=microbatches,
    )


def own_rotary_positions(world):
    for text in (
        "tp=2,dp=2,zero=3",
        "tp=2,cp=2",
        "pp=2,cp=2,zero=1",
        "pp=2,tp=2,sequence_parallel=1",
        "cp=2,tp=2,sequence_parallel=1",
        "tp=4,tensor=2d",
    ):
        with turn(text=text):
            compare(text)
    for context in ("ulysses", "allgather"):
        with turn(context=context):
            compare("cp=2,dp=2", context=context)

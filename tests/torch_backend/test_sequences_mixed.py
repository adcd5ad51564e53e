"""Context parallelism with tensor parallelism by a plan and with pipelines, of models that know
nothing of a layout: equal to one process, or refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from cases_in_turn import turn
from torch_backend.planned_models import FusedDecoder, GroupedDecoder
from torch_backend.sequence_models import (
    STYLES,
    VOCAB,
    WIDTH,
    Attention,
    Decoder,
    adamw,
    compare_sequences,
    token_batches,
)
from torch_backend.test_sequences_4 import refused
from unisono.parallel import CrossEntropy, Layout, model_loss, parallelize

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
TENSOR, PIPELINE = "cp=2,tp=2", "cp=2,pp=2"


def test_sequences_mixed(outcome):
    outcome.require_success()


def compare(text: str, kind: str, **options: Any) -> None:
    """Compares a decoder with its own loss, of masked or packed samples if it has such a kind."""
    batches = token_batches(masked=kind in ("full", "window"), packed=kind == "packed")[:3]
    model = options.pop("model", {})
    if "tp=" in text:
        options |= {"styles": STYLES}
    if "pp=" in text:
        options |= {"example": batches[0]}

    def check(run: Any, _: nn.Module) -> None:
        """Compares predicted bytes, which do not count passes that run again."""
        report = run.report()
        for axis in {"tp", "pp", "shard"} & {*report.bytes_sent}:
            sent, predicted = report.bytes_sent[axis], report.predicted.bytes_sent[axis]
            assert sent == predicted, (axis, sent, predicted)

    compare_sequences(
        text, partial(Decoder, kind, **model), batches, microbatches=3,
        check=None if "checkpoints" in model else check, **options,
    )  # fmt: skip


def own_heads_and_positions(world):
    torch.set_default_dtype(torch.float64)
    for kind in ("rotary", "learned", "full", "packed", "window"):
        with turn(kind=kind):
            compare(TENSOR, kind)
    compare(TENSOR, "learned", model={"is_eager": True})


def own_heads_and_positions_again(world):
    """Parts of the forward pass run again in the backward pass."""
    torch.set_default_dtype(torch.float64)
    for text in (TENSOR, PIPELINE, f"{PIPELINE},schedule=zbv"):
        with turn(text=text):
            layers = {"layers": 4} if "zbv" in text else {}
            compare(text, "rotary", model={"checkpoints": False} | layers)


def own_blocks_and_positions(world):
    torch.set_default_dtype(torch.float64)
    for kind in ("rotary", "learned", "full", "packed"):
        with turn(kind=kind):
            compare(PIPELINE, kind)
    compare(f"{PIPELINE},vpp=2", "window", model={"layers": 4})
    compare(PIPELINE, "rotary", model={"has_experts": True})


def own_blocks_without_a_graph(world):
    """Tests a model that asks for values of tensors, which torch.export cannot trace."""
    torch.set_default_dtype(torch.float64)
    compare("dp=2,pp=2,zero=1", "learned", model={"has_experts": True})


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(each["input_ids"], each["labels"]) for each in token_batches()[:3]]


def compare_pairs(text: str, make: Any, **options: Any) -> None:
    """Compares a model of tokens with a loss of its logits."""
    compare_sequences(
        text, make, pairs(), loss=CrossEntropy(VOCAB), microbatches=3,
        alone=lambda model, pair: CrossEntropy()(model(pair[0]), pair[1]),
        passed=lambda _, pair: pair, **options,
    )  # fmt: skip


def own_plans_of_models(world):
    """Norms of heads, heads of keys that ranks share, fused layers, tied tables."""
    torch.set_default_dtype(torch.float64)
    compare_pairs(TENSOR, GroupedDecoder)
    compare_pairs(TENSOR, partial(GroupedDecoder, key_heads=1, tied=False, bias=False))
    compare_pairs(TENSOR, FusedDecoder, styles=FusedDecoder.styles)


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, None, None, True)


def a_sequence() -> nn.Sequential:
    """Plain modules in a sequence, two of which mix positions."""
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Embedding(VOCAB, WIDTH), Causal(), nn.Linear(WIDTH, 20), nn.GELU(),
        nn.Linear(20, WIDTH), Causal(), nn.Linear(WIDTH, VOCAB),
    )  # fmt: skip


def own_sequences_of_modules(world):
    torch.set_default_dtype(torch.float64)
    for text in (TENSOR, PIPELINE, f"{PIPELINE},schedule=zb1p"):
        with turn(text=text):
            compare_pairs(text, a_sequence)


class Summed(Decoder):
    """Combines positions in its last block."""

    def __init__(self) -> None:
        super().__init__("rotary")
        self.layers[1].routed = Cumulative()


class Cumulative(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)


def own_refusals(world):
    torch.set_default_dtype(torch.float64)
    batch = token_batches()[0]

    def runs(model: nn.Module, text: str, **options: Any) -> Any:
        return lambda: parallelize(
            model, Layout.parse(text), optimizer=adamw, loss=model_loss,
            microbatches=3, **options,
        )  # fmt: skip

    for text in (TENSOR, PIPELINE):
        options = {"styles": STYLES} if text == TENSOR else {"example": batch}
        match = "layers.1.routed .Cumulative.: cumsum works along the positions, .* dp in place of"
        with turn(text=text):
            refused(runs(Summed(), text, **options), match, batch)
    blocks = "with cp = 2 cuts a model between its repeated blocks, but "
    one = Decoder("rotary", layers=1)
    refused(
        runs(one, PIPELINE, example=batch),
        f"{blocks}Decoder calls layers.0.attention between",
        batch,
    )
    refused(
        runs(Decoder("rotary", layers=2), "cp=2,pp=2,vpp=2", example=batch),
        "has 2 blocks for 4 stages; pp = 2 without cp = 2, or pp = 1, works",
        batch,
    )
    refused(runs(Decoder("rotary"), PIPELINE), "needs an example|example=inputs", batch)
    odd = {name: each[:, 1:] for name, each in batch.items()}
    refused(
        runs(Decoder("rotary"), PIPELINE, example=odd),
        "got 15; the nearest is 16; cp = 2 takes dimension 1 of .2, 15. for positions; dp = 2 w",
        batch,
    )
    refused(runs(Decoder("rotary"), "cp=2,tp=2,sequence_parallel=1", styles=STYLES), "works", batch)

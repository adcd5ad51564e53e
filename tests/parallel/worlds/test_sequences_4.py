"""Context parallelism of models that know nothing of it: equal to one process, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cases_in_turn import turn
from parallel.worlds.layout_training import compare_weights
from parallel.worlds.own_loss_models import ModelOutput
from parallel.worlds.sequence_models import (
    POSITIONS,
    VOCAB,
    WIDTH,
    Decoder,
    adamw,
    compare_sequences,
    token_batches,
)
from unisono.parallel import Layout, model_loss, parallelize
from unisono.parallel.run import ParallelRun

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
MIXED = "dp=2,cp=2"


def test_sequences_4(outcome):
    outcome.require_success()


def own_layouts(world):
    torch.set_default_dtype(torch.float64)
    batches = token_batches()
    for text, microbatches in (("cp=4", 1), (MIXED, 3), (f"{MIXED},zero=1", 1),
                               (f"{MIXED},zero=3", 2), ("cp=4,zero=3", 1)):  # fmt: skip
        with turn(text=text):
            compare_sequences(text, partial(Decoder, "rotary"), batches, microbatches=microbatches)


CASES: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "learned": ({}, {}),
    "rotary": ({}, {"masked": True}),
    "window": ({"scale": 0.3}, {}),
    "full": ({"repeats": True}, {"masked": True}),
    "packed": ({}, {"packed": True}),
    "learned, eager": ({"is_eager": True}, {}),
    "rotary, eager": ({"is_eager": True}, {"masked": True}),
    "rotary, experts": ({"has_experts": True}, {}),
    "learned, experts again": ({"has_experts": True, "checkpoints": False}, {}),
    "learned, again": ({"checkpoints": False}, {}),
    "window, again": ({"checkpoints": False}, {"masked": True}),
}


def own_kinds(world):
    torch.set_default_dtype(torch.float64)
    for name, (options, kind) in CASES.items():
        texts = (MIXED, f"{MIXED},zero=3") if "again" in name else (MIXED,)
        for text in texts:
            with turn(name=name, text=text):
                model = partial(Decoder, name.partition(",")[0], **options)
                compare_sequences(text, model, token_batches(**kind), microbatches=2)


class Logits(Decoder):
    """A model of tokens alone, which returns logits."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens).logits


class Vectors(nn.Module):
    """A model of vectors in place of tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.scale = nn.Parameter(torch.linspace(0.5, 1, POSITIONS))
        self.inside, self.outside = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inside(x * self.scale[: x.shape[1], None]).unsqueeze(1)
        mixed = functional.scaled_dot_product_attention(y, y, y, is_causal=True).squeeze(1)
        return self.outside(mixed)


def own_pairs(world):
    torch.set_default_dtype(torch.float64)

    def cross_entropy(output, targets):
        return functional.cross_entropy(output.flatten(0, 1), targets.flatten())

    def summed(output, targets):
        losses = functional.cross_entropy(output.transpose(1, 2), targets, reduction="none")
        return (losses * (targets != -100)).sum(), (targets != -100).sum()

    def mean(output, targets):
        total, weight = summed(output, targets)
        return total / weight

    batches = [(each["input_ids"], each["labels"]) for each in token_batches()]
    vectors = [(x.sin().unsqueeze(-1) * torch.ones(3), x.cos().unsqueeze(-1) * torch.ones(3))
               for x, _ in batches]  # fmt: skip
    cases = [
        (partial(Logits, "learned"), batches, cross_entropy, cross_entropy),
        (partial(Logits, "rotary"), batches, mean, summed),
        (Vectors, vectors, functional.mse_loss, nn.MSELoss()),
    ]
    for make, found, alone, loss in cases:
        with turn(make=make, loss=loss):
            compare_sequences(
                MIXED, make, found, loss=loss, microbatches=2,
                alone=lambda model, pair, loss=alone: loss(model(pair[0]), pair[1]),
                passed=lambda _, pair: pair,
            )  # fmt: skip


def own_local_batches(world):
    torch.set_default_dtype(torch.float64)

    def own_part(run: ParallelRun, batch: dict[str, torch.Tensor]) -> tuple[Any, ...]:
        if run.mesh.coordinates["cp"] != run.data_parallel_rank % 2:
            return (None,)  # another rank with these samples passes them
        place = slice(0, 2) if run.data_parallel_rank == 0 else slice(2, None)
        return ({name: each[place] for name, each in batch.items()},)

    model = partial(Decoder, "rotary")
    compare_sequences(MIXED, model, token_batches(), batch="local", passed=own_part)


def own_checkpoints_of_other_layouts(world):
    torch.set_default_dtype(torch.float64)
    batches, folder = token_batches(), world.folder / "sequences"
    make = partial(Decoder, "learned")

    def go_on(run: ParallelRun, whole: nn.Module) -> None:
        run.save(folder)
        options = {"loss": model_loss, "optimizer": adamw, "clip": 0.5}
        for text in ("cp=4,zero=3", "dp=4"):
            other = parallelize(make(), Layout.parse(text), **options)
            other.load(folder)
            compare_weights(other, whole, make(), tolerance=1e-9)
            other.mesh.close()

    compare_sequences(MIXED, make, batches, check=go_on)


def own_narrow_types(world):
    for dtype in (torch.bfloat16, torch.float16):
        torch.set_default_dtype(torch.float32)
        for kind in ("rotary", "window", "full"):
            with turn(dtype=dtype, kind=kind):

                def make(kind=kind, dtype=dtype):
                    return Decoder(kind).to(dtype)

                run = parallelize(make(), Layout(cp=4), loss=model_loss, optimizer=adamw)
                batch = token_batches()[0]
                loss = make()(**batch).loss
                loss.backward()
                assert float(run.step(batch)) == pytest.approx(float(loss), rel=0.01)
                run.mesh.close()


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def own_autocast(world):
    torch.set_default_dtype(torch.float32)
    batch, losses = token_batches()[0], []
    run = parallelize(Decoder("rotary"), Layout(cp=4), loss=model_loss, optimizer=adamw)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [float(run.step(batch)), float(Decoder("rotary")(**batch).loss.detach())]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    run.mesh.close()


class Shifting(nn.Module):
    """Combines positions by a function between an embedding and a head."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.function = function

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.function(self.embedding(tokens)))


def refused(make: Callable[[], ParallelRun], match: str, *arguments: Any) -> None:
    """Fails unless all ranks refuse a step in one line."""
    run = None
    with pytest.raises(ValueError, match=match) as caught:
        run = make()
        run.step(*arguments)
    assert "\n" not in str(caught.value)
    if run is not None:
        run.mesh.close()


def own_refusals_of_models(world):
    torch.set_default_dtype(torch.float64)
    tokens = token_batches()[0]["input_ids"]

    def runs(model: nn.Module, text: str = MIXED, **options: Any) -> Callable[[], ParallelRun]:
        return lambda: parallelize(
            model, Layout.parse(text), optimizer=adamw, **{"loss": nn.CrossEntropyLoss()} | options
        )

    functions = {
        "cumsum works along the positions": lambda x: x.cumsum(1),
        "mean combines positions": lambda x: x + x.mean(1, keepdim=True),
        "take some of the positions": lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
        "flip may combine positions": lambda x: x.flip(1),
    }
    for match, function in functions.items():
        with turn(match=match):
            model = Shifting(function)
            refused(runs(model), f"(?s)the model .Shifting.: .*{match}", tokens, tokens)
    model = Shifting(lambda x: x)
    model.function = lambda x, of=model.convolution: of(x.mT).mT
    refused(runs(model), "convolution .Conv1d.: conv1d may combine positions", tokens, tokens)
    declared = Declared(lambda x: x.cumsum(1))
    refused(runs(declared), "cumsum works along the positions", tokens, tokens)
    refused(runs(Shifting(lambda x: x)), "multiple of 2 x 2 = 4, got 15", tokens[:, 1:], tokens)
    images, match = torch.ones(2, 3, 8, 8), "dimension 1 of .2, 3, 8, 8. for positions; dp = 4 wi"
    refused(runs(Shifting(lambda x: x)), match, images, images)
    numbers = tokens.double()
    refused(runs(nn.Linear(POSITIONS, 2)), "the batch has none; dp = 4 without cp", numbers, tokens)
    whole = nn.Sequential(Shifting(lambda x: x), Outside())
    square = torch.arange(2 * POSITIONS**2).reshape(2 * POSITIONS, POSITIONS) % VOCAB
    refused(runs(TimeFirst()), "output of the model of shape .* is not divided", square, square)
    scripted = Shifting(torch.jit.script(doubled))
    refused(runs(scripted), "output of the model of shape .* is not divided", tokens, tokens)
    refused(runs(whole), "output of the model of shape .* is not divided", tokens, tokens)


class TimeFirst(nn.Module):
    """Looks up (positions, samples), as many samples as positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens.T).transpose(0, 1)


class Declared(Shifting):
    """Says that it treats each position alone, which its convolution does not."""

    is_per_position = True


class Outside(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones(x.shape, requires_grad=True)


def own_keys_and_values_are_gathered_together(world):
    torch.set_default_dtype(torch.float64)
    run = parallelize(Decoder("window"), Layout(cp=4), loss=model_loss, optimizer=adamw)
    before = run.mesh.stats()["cp"]
    run.step(token_batches()[0])
    operations = (run.mesh.stats()["cp"] - before).operations
    calls = [operations[name].calls for name in ("all_gather", "reduce_scatter")]
    assert calls == [2, 2], "one of each for each layer"
    run.mesh.close()


def own_refusals_of_losses(world):
    torch.set_default_dtype(torch.float64)
    batch = token_batches()[0]

    def runs(**options: Any) -> Callable[[], ParallelRun]:
        model = options.pop("model", None) or Decoder("learned")
        return lambda: parallelize(model, Layout.parse(MIXED), optimizer=adamw, **options)

    def on_logits(output: ModelOutput, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())

    refused(
        runs(loss=on_logits), "not the loss of the run, .*loss=model_loss without weight=", batch
    )
    refused(runs(loss=model_loss, weight=lambda batch: 1.0), "without weight= works", batch)
    again = Decoder("learned", checkpoints=True)
    refused(runs(loss=model_loss, model=again), r"use_reentrant=False\) works", batch)
    shifts = ShiftedLogits("learned")
    refused(runs(loss=model_loss, model=shifts), "take some of the positions", batch)


class ShiftedLogits(Decoder):
    """Shifts logits in place of labels."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> ModelOutput:
        logits = super().forward(input_ids).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return ModelOutput(loss, logits)

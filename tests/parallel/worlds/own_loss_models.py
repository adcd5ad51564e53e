"""Models that compute their loss themselves, as those of transformers do, and their training in one
process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from parallel.worlds.layout_training import CLIP, TOLERANCE, compare_weights, sgd
from unisono.parallel import Layout, model_loss, parallelize
from unisono.parallel.run import ParallelRun

VOCAB, POSITIONS, WIDTH, SAMPLES = 11, 6, 8, 8


@dataclass
class ModelOutput:
    loss: torch.Tensor | None
    logits: torch.Tensor


class Decoder(nn.Module):
    """A causal language model, whose labels are the tokens: the model shifts them."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(drop)
        self.head = nn.Linear(WIDTH, VOCAB)

    def logits(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        x = self.embedding(input_ids)
        if attention_mask is not None:
            x = x * attention_mask.unsqueeze(-1)
        for layer in self.layers:
            x = x + self.dropout(layer(x.cumsum(1)).tanh())
        return self.head(x)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: int | None = None,
        scale: float = 1.0,
    ) -> ModelOutput:
        logits = self.logits(input_ids, attention_mask) * scale
        if labels is None:
            return ModelOutput(None, logits)
        shifted = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = functional.cross_entropy(
            logits.view(-1, VOCAB), shifted.view(-1), ignore_index=-100, reduction=reduction
        )
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
        return ModelOutput(loss, logits)


def token_batches(steps: int = 3, samples: int = SAMPLES) -> list[dict[str, torch.Tensor]]:
    """Returns batches whose samples have different numbers of labels; one part has none."""
    generator = torch.Generator().manual_seed(6)
    found = []
    for _ in range(steps):
        ids = torch.randint(0, VOCAB, (samples, POSITIONS), generator=generator)
        labels = ids.clone()
        labels[0, 2:], labels[samples // 2 :, 1:3], labels[-2:] = -100, -100, -100
        mask = torch.ones(samples, POSITIONS, dtype=torch.float64)
        mask[1, 4:] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def loss_of_whole(model: nn.Module, batch: Any) -> torch.Tensor:
    """Returns the loss of a whole batch in one process."""
    return model_loss(model(**batch), batch)


def train_alone(
    model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor], batches: Sequence[Any]
) -> tuple[list[float], list[float]]:
    """Trains a model in this process; returns the losses and the norms of the gradients."""
    optimizer, losses, norms = sgd(list(model.parameters())), [], []
    for batch in batches:
        optimizer.zero_grad()
        found = loss(model, batch)
        found.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(found.detach()))
    return losses, norms


def compare(
    text: str,
    make_model: Callable[[], nn.Module],
    batches: Sequence[Any],
    *,
    alone: Callable[[nn.Module, Any], torch.Tensor] = loss_of_whole,
    passed: Callable[[ParallelRun, Any], tuple[Any, ...]] = lambda _, batch: (batch,),
    tolerance: float = TOLERANCE,
    **options: Any,
) -> None:
    """Trains with a layout, and evaluates. Fails if a loss, a norm or a weight differs from one
    process.

    `alone`: the loss of a whole batch in one process. `passed`: the arguments of a step.
    """
    torch.set_default_dtype(torch.float64)
    whole = make_model()
    before = copy.deepcopy(whole)
    losses, norms = train_alone(whole, alone, batches)
    run = parallelize(
        make_model(),
        Layout.parse(text),
        optimizer=sgd,
        clip=CLIP,
        **{"loss": model_loss} | options,
    )
    for step, batch in enumerate(batches):
        loss = float(run.step(*passed(run, batch)))
        assert abs(loss / losses[step] - 1) < tolerance, (text, step, loss, losses[step])
        assert abs(run.gradient_norm / norms[step] - 1) < tolerance, (text, step)
    before_evaluation = run.report()
    with torch.no_grad():
        expected = float(alone(whole.eval(), batches[0]))
    found = float(run.evaluate(*passed(run, batches[0])))
    assert abs(found / expected - 1) < tolerance, (text, found, expected)
    assert run.report() == before_evaluation
    compare_weights(run, whole, before)
    run.mesh.close()


class Classifier(nn.Module):
    """A model with the losses of transformers for one label of a sample."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(5)
        self.kind = kind
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1 if kind == 1 else 4)

    def forward(self, values, labels):
        logits = self.head(self.layer(values).tanh())
        if self.kind == "classes":
            loss = nn.CrossEntropyLoss()(logits.view(-1, 4), labels.view(-1))
        elif self.kind == "labels":
            loss = nn.BCEWithLogitsLoss()(logits, labels)
        elif self.kind == 1:
            loss = nn.MSELoss()(logits.squeeze(), labels.squeeze())
        elif self.kind == "tuple":
            return functional.mse_loss(logits, labels), logits
        elif self.kind == "scaled":
            return {"loss": 2 * functional.mse_loss(logits, labels).double() / 3}
        elif self.kind == "two":
            halves = logits.chunk(2, -1), labels.chunk(2, -1)
            loss = sum(functional.mse_loss(x, y) for x, y in zip(*halves, strict=True)) / 2
        elif self.kind == "in place":
            loss = functional.mse_loss(logits, labels)
            loss += 0.1 * logits.square().mean()
        elif self.kind == "masked":
            loss = functional.mse_loss(logits, labels, reduction="none")[labels > 0.5].mean()
        else:
            loss = None
        return SimpleNamespace(loss=loss, logits=logits)


def values(kind, samples=7, steps=3):
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(steps):
        inputs = torch.rand(samples, WIDTH, generator=generator, dtype=torch.float64) - 0.5
        labels = torch.rand(samples, 4, generator=generator, dtype=torch.float64)
        if kind == "classes":
            labels = labels.argmax(-1)
            labels[:3] = -100
        elif kind == 1:
            labels = labels[:, :1]
        found.append({"values": inputs, "labels": labels})
    return found


def run_of(model, text="dp=2", **options):
    torch.set_default_dtype(torch.float64)
    return parallelize(model, Layout.parse(text), optimizer=sgd, **{"loss": model_loss} | options)


def refused(run, match, *arguments, **options):
    """Fails unless a step raises `ValueError` with one line on all ranks, without a change."""
    before = copy.deepcopy([each.values.detach() for found in run.sets for each in found.held])
    for action in (run.step, run.evaluate):
        with pytest.raises(ValueError, match=match) as caught:
            action(*arguments, **options)
        assert "\n" not in str(caught.value)
    after = [each.values.detach() for found in run.sets for each in found.held]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class FirstOfSequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values):
        return self.layer(values["left"] - values["right"])


class LastOfSequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return ModelOutput(functional.mse_loss(self.layer(x), torch.zeros(len(x), 4)), x)


def sequence():
    torch.manual_seed(2)
    return nn.Sequential(FirstOfSequence(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), LastOfSequence())

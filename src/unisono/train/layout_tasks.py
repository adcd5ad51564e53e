"""The models and batches of tasks that are divided by a layout; equal on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from unisono.parallel import DLRM, CrossEntropy, TransformerModel, draw_weights
from unisono.train.click_logs import CLICK_SHAPE, SAMPLES, click_log
from unisono.train.digits_task import Digits
from unisono.train.layout_settings import SHAPES, LayoutRun
from unisono.train.text_task import library_windows

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LayoutTaskParts:
    """A model, its loss, its optimizer, and the samples from which batches are drawn."""

    model: nn.Module
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    inputs: torch.Tensor
    targets: torch.Tensor

    def batch(self, run: LayoutRun, step: int) -> Batch:
        """Returns the batch of a step, which is equal on all ranks and in all layouts."""
        generator = torch.Generator().manual_seed(run.seed * 1_000_003 + step)
        chosen = torch.randint(0, len(self.inputs), (run.batch,), generator=generator)
        return self.inputs[chosen], self.targets[chosen]


def build_task(run: LayoutRun) -> LayoutTaskParts:
    """Returns the model, loss, optimizer and loaded data of a run's task."""
    builders = {"digits": _digits, "dlrm": _clicks}
    return builders.get(run.task, _language)(run)


def _digits(run: LayoutRun) -> LayoutTaskParts:
    data = Digits.load()
    images, labels = data.train_set.tensors
    model = data.model()
    draw_weights(model, run.seed)

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=run.learning_rate, momentum=0.9, nesterov=True)

    return LayoutTaskParts(
        model=model,
        loss=functional.cross_entropy,
        optimizer=optimizer,
        inputs=images.to(torch.get_default_dtype()),
        targets=labels,
    )


def _clicks(run: LayoutRun) -> LayoutTaskParts:
    inputs, clicks = click_log(CLICK_SHAPE, samples=SAMPLES, seed=run.seed)

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, lr=run.learning_rate)

    return LayoutTaskParts(
        model=DLRM(CLICK_SHAPE, seed=run.seed, placement=run.placement, samples=run.batch),
        loss=functional.binary_cross_entropy_with_logits,
        optimizer=optimizer,
        inputs=inputs,
        targets=clicks,
    )


def _language(run: LayoutRun) -> LayoutTaskParts:
    shape = run.shape or SHAPES[run.task]
    windows = library_windows(shape.positions)
    model = TransformerModel(
        shape,
        seed=run.seed,
        context=run.context,
        dropout=run.dropout,
        capacity_factor=run.capacity_factor,
    )

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters, lr=run.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )

    return LayoutTaskParts(
        model=model,
        loss=cast(
            "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]", CrossEntropy(shape.vocab)
        ),
        optimizer=optimizer,
        inputs=windows[:, :-1].contiguous(),
        targets=windows[:, 1:].contiguous(),
    )

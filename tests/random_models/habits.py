"""What a program does around the steps of a run, besides passing batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Parameters = Iterable[nn.Parameter]


@dataclass(frozen=True, kw_only=True, slots=True)
class Habit:
    """A way to use a run. The defaults do nothing."""

    prepare: Callable[[nn.Module], object] = lambda model: None
    """Receives the model before it is divided."""
    after_step: Callable[[int, Parameters], None] = lambda step, parameters: None
    """Receives the number of each finished step and this rank's parameters."""
    make_schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    """Makes a schedule of the learning rate."""
    is_refused: bool = False
    """Whether no result can be right, so an error on all ranks is expected."""
    needs_ranks: bool = False
    """Whether the habit does nothing on one rank."""
    trains_loss: bool = False
    """Whether the optimizer also receives the parameters of the loss."""
    collects_first: bool = False
    """Whether the optimizer receives the parameters that the model had before its division."""
    uses_loss_before: bool = False
    """Whether the loss object has served another run, of one rank's size, before."""
    alter: Callable[[int, int, int, Any, Any], tuple[Any, Any]] = (
        lambda step, rank, ranks, inputs, targets: (
            inputs,
            targets,
        )
    )
    """Changes a batch: receives the step, this rank and the number of ranks."""


@torch.no_grad()
def _shrink(step: int, parameters: Parameters) -> None:
    if step == 0:
        for each in parameters:
            if each.is_floating_point() and each.requires_grad:
                each.mul_(0.9)


def _own_part(step: int, rank: int, ranks: int, inputs: Any, targets: Any) -> tuple[Any, Any]:
    return inputs.tensor_split(ranks)[rank], targets.tensor_split(ranks)[rank]


def _other_batch(step: int, rank: int, ranks: int, inputs: Any, targets: Any) -> tuple[Any, Any]:
    if step == 0 or rank < ranks - 1:
        return inputs, targets
    return inputs.roll(1, 0), targets.roll(1, 0)


def _missing_target(step: int, rank: int, ranks: int, inputs: Any, targets: Any) -> tuple[Any, Any]:
    return (inputs, targets[:-1]) if step == 1 and rank == ranks - 1 else (inputs, targets)


def _named_inputs(step: int, rank: int, ranks: int, inputs: Any, targets: Any) -> tuple[Any, Any]:
    return {"x": inputs}, targets


def _listed(step: int, rank: int, ranks: int, inputs: Any, targets: Any) -> tuple[Any, Any]:
    return inputs.tolist(), targets


def _no_targets(step: int, rank: int, ranks: int, inputs: Any, targets: Any) -> tuple[Any, Any]:
    return inputs, None


HABITS: dict[str, Habit] = {
    "none": Habit(),
    "eval": Habit(prepare=nn.Module.eval),
    "schedule": Habit(make_schedule=lambda each: torch.optim.lr_scheduler.ExponentialLR(each, 0.5)),
    "shrink": Habit(after_step=_shrink),
    "train_loss": Habit(trains_loss=True),
    "collect_first": Habit(collects_first=True),
    "loss_used_before": Habit(uses_loss_before=True),
    "own_part": Habit(alter=_own_part, needs_ranks=True, is_refused=True),
    "other_batch": Habit(alter=_other_batch, needs_ranks=True, is_refused=True),
    "missing_target": Habit(alter=_missing_target, is_refused=True),
    "named_inputs": Habit(alter=_named_inputs, is_refused=True),
    "listed_inputs": Habit(alter=_listed, is_refused=True),
    "no_targets": Habit(alter=_no_targets, is_refused=True),
}

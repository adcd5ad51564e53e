"""Training of a case in one process, with torch alone: the expected result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from random_models.batches import make_batches
from random_models.case import Case
from random_models.habits import HABITS
from random_models.losses import make_loss
from random_models.models import make_model
from random_models.optimizers import OPTIMIZERS
from random_models.outcome import Outcome
from unisono.parallel.divisible.interfaces import Balanced
from unisono.parallel.layers import BatchPlace, LayoutDropout

_ROUNDING = 2.0**-8
"""The relative error of bfloat16."""


def prepare_process(case: Case) -> None:
    """Sets the number of threads and the default type of a case."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32 if case.autocast else torch.float64)


def main(text: str, folder: Path, disturbance: int = 0) -> None:
    """Trains a case, and writes the outcome to the folder. `disturbance`: the seed of small random
    changes of the weights; 0 for none."""
    case, outcome = Case.from_json(text), Outcome(phase="one process")
    try:
        prepare_process(case)
        train(case, outcome, disturbance)
    except Exception as error:
        outcome.fail(error)
    outcome.write(folder / "alone.outcome")


@torch.no_grad()
def _disturb(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for each in model.parameters():
        each.mul_(1 + _ROUNDING * torch.randn(each.shape, generator=generator))


def train(case: Case, outcome: Outcome, disturbance: int = 0) -> None:
    """Trains the model of a case on whole batches."""
    habit = HABITS[case.habit]
    model, batches = make_model(case), make_batches(case)
    loss = make_loss(case.loss, case.container)
    with torch.no_grad():
        model(batches[0][0])  # gives lazy modules their shapes
    model = make_model(case) if not _is_lazy(make_model(case)) else model
    if disturbance:
        _disturb(model, disturbance)
    habit.prepare(model)
    parameters = list(model.parameters())
    trained = [each for each in parameters if each.requires_grad]
    extra = list(loss.parameters()) if habit.trains_loss and isinstance(loss, nn.Module) else []
    optimizer = OPTIMIZERS[case.optimizer](trained + extra)
    schedule = habit.make_schedule and habit.make_schedule(optimizer)
    for step, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        _begin(model, step)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            found = loss(model(inputs), targets)
        if isinstance(found, tuple):  # sum and weight
            found = found[0] / found[1]
        found.backward()  # also adds the gradients of the experts' balance losses
        balance = [each.auxiliary_loss for each in model.modules() if isinstance(each, Balanced)]
        outcome.losses.append(float(found.detach() + sum(balance)))
        outcome.norms.append(_clip(trained + extra, case.clip))
        optimizer.step()
        if schedule is not None:
            schedule.step()
        habit.after_step(step, parameters)
    outcome.weights = {
        name: ((0,) * each.dim(), each.detach()) for name, each in model.state_dict().items()
    }


def _clip(parameters: Sequence[nn.Parameter], limit: float | None) -> float:
    """Clips gradients, of which some may be sparse, as torch does. Returns their norm."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    dense = [each.to_dense() if each.is_sparse else each for each in gradients]
    norm = float(sum(each.abs().square().sum() for each in dense)) ** 0.5
    if limit is not None and norm > limit:
        for each in gradients:
            each.mul_(limit / (norm + 1e-6))
    return norm


def _is_lazy(model: nn.Module) -> bool:
    return any(isinstance(each, nn.parameter.UninitializedParameter) for each in model.parameters())


def _begin(model: nn.Module, step: int) -> None:
    for module in model.modules():
        if isinstance(module, LayoutDropout):
            module.place = BatchPlace(step=step)
        if isinstance(module, Balanced):
            module.reset_auxiliary()

"""Training of a case on one rank of its layout."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

import unisono.torch_backend  # noqa: F401 - where the entry point is not installed
from random_models.batches import make_batches
from random_models.case import Case
from random_models.habits import HABITS, Habit
from random_models.losses import make_loss
from random_models.models import make_model
from random_models.optimizers import OPTIMIZERS
from random_models.outcome import Outcome
from random_models.training_alone import prepare_process
from unisono.parallel import Layout, ParallelRun, parallelize
from unisono.parallel.run.files.run_state import model_blocks

_OTHER_SEED = 1000
"""Added to the seed of a model whose weights a checkpoint replaces."""
_LONG_S = 3600.0


def main(rank: int, text: str, folder: Path) -> None:
    """Trains a case on one rank, and writes the outcome to the folder.

    Stays alive afterwards: a rank that has caught an error must not keep other ranks waiting.
    """
    case, outcome = Case.from_json(text), Outcome(phase="init_process_group")
    try:
        prepare_process(case)
        store = dist.FileStore(str(folder / "store"), case.ranks)
        dist.init_process_group("unisono", store=store, rank=rank, world_size=case.ranks)
        outcome.phase = "parallelize"
        train(case, rank, folder, outcome)
        outcome.phase = "end"
    except Exception as error:
        outcome.fail(error)
    outcome.write(folder / f"{rank}.outcome")
    time.sleep(_LONG_S)


def train(case: Case, rank: int, folder: Path, outcome: Outcome) -> None:
    """Trains the model of a case with its layout; goes on in another layout if the case says so."""
    habit, batches = HABITS[case.habit], make_batches(case)
    loss = make_loss(case.loss, case.container)
    if habit.uses_loss_before:
        _use_before(case, loss)
    half = len(batches) // 2 if case.resumed is not None else len(batches)
    run = _make(case, case.layout, loss, habit)
    schedule = habit.make_schedule and habit.make_schedule(run.optimizer)
    for step, (inputs, targets) in enumerate(batches):
        if step == half:
            outcome.phase = "save"
            run.save(folder / "checkpoint")
            outcome.phase = "parallelize again"
            other = replace(case, seed=case.seed + _OTHER_SEED)
            run = _make(other, case.resumed or "", make_loss(case.loss, case.container), habit)
            outcome.phase = "load"
            run.load(folder / "checkpoint")
        outcome.phase = f"step {step}"
        batch = habit.alter(step, rank, case.ranks, inputs, targets)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            outcome.losses.append(float(run.step(*batch)))
        outcome.norms.append(run.gradient_norm)
        if schedule is not None:
            schedule.step()
        habit.after_step(step, (each for _, stage in run.stages for each in stage.parameters()))
    outcome.phase = "weights"
    outcome.weights = _weights(run)


def _make(case: Case, layout: str, loss: nn.Module, habit: Habit) -> ParallelRun:
    model, example = make_model(case), make_batches(case)[0][0]
    habit.prepare(model)
    collected = list(model.parameters())
    extra = list(loss.parameters()) if habit.trains_loss and isinstance(loss, nn.Module) else []

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        given = collected if habit.collects_first else parameters
        return OPTIMIZERS[case.optimizer]([*given, *extra])

    return parallelize(
        model,
        Layout.parse(layout),
        loss=loss,
        optimizer=optimizer,
        microbatches=case.microbatches,
        clip=case.clip,
        example=example if case.example else None,
    )


def _use_before(case: Case, loss: nn.Module) -> None:
    """Uses the loss in a run of the same model with data parallelism."""
    other = replace(case, microbatches=1, optimizer="sgd")
    run = _make(other, f"dp={case.ranks}", loss, HABITS["none"])
    run.step(*make_batches(case)[0])


def _weights(run: ParallelRun) -> dict[str, tuple[tuple[int, ...], torch.Tensor]]:
    model = run._model
    blocks = model_blocks(model.trained, model.frozen, model.modules, run.mesh)
    return {each.name: (each.start, each.values.detach().clone()) for each in blocks}

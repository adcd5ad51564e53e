"""Parameters that a step does not use, or that are frozen between steps: each layout trains as one
process does, whose optimizer skips parameters without a gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from cases_in_turn import turn
from parallel.worlds.layout_training import TOLERANCE, compare_weights
from parallel.worlds.test_layout_checkpoint import shared_folder
from unisono.parallel import Layout, parallelize
from unisono.parallel.run import ParallelRun

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)
WIDTH, SAMPLES = 6, 8


def test_unused_parameters(outcome):
    outcome.require_success()


class Gate(nn.Module):
    """Adds terms for the samples whose last feature is 1: `extra`, and `branch` unless it is None.

    Uses `extra` and `branch` only if there are such samples, and never uses `never`.
    """

    def __init__(self, branch: nn.Module | None) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.extra = nn.Parameter(torch.randn(5))
        self.never = nn.Parameter(torch.randn(3))
        self.branch = branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, -1:] == 1
        inner = torch.tanh(x @ self.base)[:, :-1]
        if chosen.any():
            inner = inner + chosen * self.extra
            if self.branch is not None:
                inner = inner + chosen * self.branch(x)[:, :-1]
        return torch.cat([inner, x[:, -1:]], 1)


def gates(has_branch: bool = True) -> nn.Module:
    """Returns three gates and a linear layer. The last gate uses the `extra` of the first, which
    counts as one parameter, and `never` of both is one parameter too.
    """
    torch.manual_seed(4)
    made = [Gate(nn.Linear(WIDTH, WIDTH) if has_branch else None) for _ in range(3)]
    made[2].never, made[2].extra = made[0].never, made[0].extra
    return nn.Sequential(*made, nn.Linear(WIDTH, 2))


def batches(chosen: Sequence[Sequence[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns a batch for each row: `row` has the samples whose last feature is 1."""
    torch.manual_seed(6)
    found = [(torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, 2)) for _ in chosen]
    for (inputs, _), row in zip(found, chosen, strict=True):
        inputs[:, -1] = 0
        inputs[list(row), -1] = 1
    return found


EVERY = range(SAMPLES)
WHOLE_BATCHES = ((), EVERY, (), EVERY, ())
"""Steps in which all ranks and microbatches use a branch, or none."""
PARTS = ((), (7,), (), (0, 1, 5), ())
"""Steps in which one rank, one microbatch or one sample uses a branch."""


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01, weight_decay=0.1, eps=1e-3, amsgrad=True)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.1)


class Plain(torch.optim.SGD):
    """An optimizer whose parameters the run does not merge, since its type is unknown."""


def plain(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Plain(parameters, 0.1, momentum=0.9, weight_decay=0.1)


def freeze(model: nn.Module, step: int) -> None:
    """Freezes the bias of the last layer before step 2, and trains it again before step 4."""
    for name, each in model.named_parameters():
        if name == "3.bias":
            each.requires_grad_(step not in (2, 3))


def compare(
    text: str,
    chosen: Sequence[Sequence[int]],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    microbatches: int = 1,
    has_branch: bool = True,
    predicted: bool = True,
) -> ParallelRun:
    """Fails if weights, norms or gradients that are None differ from training in one process."""
    torch.set_default_dtype(torch.float64)
    whole, loss = gates(has_branch), nn.functional.mse_loss
    before = copy.deepcopy(whole)
    alone = make_optimizer(list(whole.parameters()))
    run = parallelize(
        gates(has_branch),
        Layout.parse(text),
        loss=loss,
        optimizer=make_optimizer,
        microbatches=microbatches,
        clip=0.5,
    )
    for step, (inputs, targets) in enumerate(batches(chosen)):
        freeze(whole, step)
        for _, stage in run.stages:
            freeze(stage, step)
        alone.zero_grad()
        expected = loss(whole(inputs), targets)
        expected.backward()
        norm = float(nn.utils.clip_grad_norm_(whole.parameters(), 0.5))
        alone.step()
        found = float(run.step(inputs, targets))
        assert abs(found / float(expected.detach()) - 1) < TOLERANCE, step
        assert abs(run.gradient_norm / norm - 1) < TOLERANCE, step
        for held in (held for each in run.sets for held in each.held):
            gradient = whole.get_parameter(held.name).grad
            assert (held.values.grad is None) == (gradient is None), (step, held.name)
        if predicted:
            report = run.report()
            assert report.bytes_sent == report.predicted.bytes_sent, step
    compare_weights(run, whole, before)
    run.mesh.close()
    return run


def own_data(world):
    for make_optimizer in (adamw, momentum, plain):
        for microbatches in (1, 2):
            with turn(make_optimizer=make_optimizer, microbatches=microbatches):
                compare("dp=2", PARTS, make_optimizer, microbatches=microbatches)


def own_sharded_states(world):
    for make_optimizer in (adamw, momentum):
        with turn(make_optimizer=make_optimizer):
            compare("dp=2,zero=1", PARTS, make_optimizer, microbatches=2)


def own_fully_sharded(world):
    for text in ("dp=2,zero=2", "dp=2,zero=3"):
        for make_optimizer in (adamw, plain):
            with turn(text=text, make_optimizer=make_optimizer):
                compare(text, WHOLE_BATCHES, make_optimizer, microbatches=2)
                # a called module, of which one rank uses fewer parameters
                compare(text, PARTS, make_optimizer, has_branch=False)


def own_pipelines(world):
    for text, microbatches in (
        ("pp=2", 2),
        ("pp=2,zero=1", 2),
        ("pp=2,vpp=2,schedule=zbv", 4),
    ):
        with turn(text=text):
            compare(text, PARTS, adamw, microbatches=microbatches, predicted=False)


def own_parameters_that_were_frozen_at_first(world):
    torch.set_default_dtype(torch.float64)
    for text in ("dp=2,zero=1", "dp=2,zero=3"):
        model = gates()
        model.get_parameter("3.bias").requires_grad_(False)
        run = parallelize(
            model, Layout.parse(text), loss=nn.functional.mse_loss, optimizer=momentum
        )
        run.step(*batches(PARTS)[0])
        run.stages[0][1].get_parameter("3.bias").requires_grad_(True)
        with pytest.raises(ValueError, match=r"3\.bias: requires a gradient now") as caught:
            run.step(*batches(PARTS)[0])
        assert "\n" not in str(caught.value)
        run.mesh.close()


def own_checkpoints(world):
    """Tests checkpoints of parameters that were used in different numbers of steps, or in none."""
    torch.set_default_dtype(torch.float64)
    loss, whole = nn.functional.mse_loss, gates()
    before, alone = copy.deepcopy(whole), adamw(list(whole.parameters()))
    for inputs, targets in batches(PARTS):
        alone.zero_grad()
        loss(whole(inputs), targets).backward()
        alone.step()
    for source, target in (("dp=2", "dp=2,zero=1"), ("dp=2,zero=1", "pp=2"), ("pp=2", "dp=2")):
        with turn(source=source, target=target):
            folder = shared_folder()
            first, run = (
                parallelize(gates(), Layout.parse(text), loss=loss, optimizer=adamw, microbatches=2)
                for text in (source, target)
            )
            for batch in batches(PARTS)[:3]:
                first.step(*batch)
            first.save(folder)
            run.load(folder)
            for batch in batches(PARTS)[3:]:
                run.step(*batch)
            compare_weights(run, whole, before)
            first.mesh.close()
            run.mesh.close()

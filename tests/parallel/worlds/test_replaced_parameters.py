"""Programs that assign to parameters, or replace parts of a run, after `parallelize`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from cases_in_turn import turn
from parallel.worlds.layout_training import compare_weights, sgd
from parallel.worlds.test_layout_checkpoint import shared_folder
from unisono.parallel import Layout
from unisono.parallel.run import ParallelRun, parallelize

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)


def test_replaced_parameters(outcome):
    outcome.require_success()


def small_model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(6)
    return [(torch.randn(8, 6), torch.randn(8, 3)) for _ in range(4)]


def a_run(text: str, make_optimizer=sgd, make_model=small_model) -> ParallelRun:
    torch.set_default_dtype(torch.float64)
    return parallelize(
        make_model(),
        Layout.parse(text),
        loss=nn.functional.mse_loss,
        optimizer=make_optimizer,
        microbatches=2,
    )


def parameter_of(run: ParallelRun, name: str) -> nn.Parameter | None:
    return dict(run.stages[0][1].named_parameters()).get(name)


def muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([each for each in parameters if each.dim() > 1], 0.01)


def adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, 0.01)


class RowDescent(torch.optim.SGD):
    """Keeps the sum of each row."""

    @torch.no_grad()
    def step(self):
        for each in self.param_groups[0]["params"]:
            if each.dim() > 1:
                self.state[each]["row"] = each.sum(-1)
        super().step()


def own_vectors_of_split_matrices(world):
    """Tests the refusal of states of rows, which torch's DTensors divide in their own way."""
    torch.set_default_dtype(torch.float64)
    run = a_run("dp=2,zero=3", RowDescent)
    run.step(*batches()[0])
    with pytest.raises(ValueError, match=r"0\.weight\.row: .*zero = 0") as caught:
        run.save(shared_folder())
    assert "\n" not in str(caught.value)
    run.step(*batches()[1])
    for text, kind in (("tp=2", "tp = 1"), ("dp=2,zero=3", "zero = 0")):
        with pytest.raises(ValueError, match=f"Adafactor uses whole parameters, .* {kind} works"):
            a_run(text, adafactor)


def own_data_of_parameters(world):
    """Tests that a step trains the values that the program has assigned to `data`."""
    torch.set_default_dtype(torch.float64)
    fresh = torch.linspace(-1, 1, 36).view(6, 6)
    whole = small_model()
    before, alone = copy.deepcopy(whole), sgd(list(whole.parameters()))
    for step, (inputs, targets) in enumerate(batches()):
        if step == 1:
            whole[0].weight.data = fresh.clone()
        alone.zero_grad()
        nn.functional.mse_loss(whole(inputs), targets).backward()
        alone.step()
    for text in ("dp=2", "dp=2,zero=1", "pp=2"):
        with turn(text=text):
            run = a_run(text)
            for step, batch in enumerate(batches()):
                if step == 1 and (found := parameter_of(run, "0.weight")) is not None:
                    found.data = fresh.clone()
                run.step(*batch)
            compare_weights(run, whole, before)
            if (found := parameter_of(run, "0.weight")) is not None:
                found.data = fresh.float()
            with pytest.raises(ValueError, match=r"0\.weight: expected data of shape"):
                run.step(*batches()[0])
            run.mesh.close()


def own_other_parameters_are_refused(world):
    torch.set_default_dtype(torch.float64)
    for text in ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"):
        with turn(text=text):
            run = a_run(text)
            run.step(*batches()[0])
            stage = run.stages[0][1]
            states = {name: each.clone() for name, each in stage.state_dict().items()}
            stage.load_state_dict(states, assign=True)
            with pytest.raises(ValueError, match=r"0\.weight: the model has another") as caught:
                run.step(*batches()[0])
            assert "\n" not in str(caught.value)
            run.mesh.close()


def biases_only(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in parameters if each.dim() == 1], 0.01, eps=1e-3)


def own_optimizers_of_some_parameters_and_of_rows(world):
    """Tests checkpoints of an optimizer of some parameters, and of one whose states are vectors for
    matrices. The second run trains on as one process does.
    """
    torch.set_default_dtype(torch.float64)
    for make_optimizer, source, target in (
        (biases_only, "dp=2,zero=1", "dp=2,zero=3"),
        (biases_only, "dp=2", "pp=2"),
        (biases_only, "dp=2,zero=3", "dp=2,zero=1"),
        (muon, "dp=2", "pp=2"),
        (adafactor, "dp=2", "pp=2"),
        (adafactor, "pp=2", "dp=2"),
    ):
        with turn(make_optimizer=make_optimizer, source=source, target=target):
            whole, folder = small_model(), shared_folder()
            before, alone = copy.deepcopy(whole), make_optimizer(list(whole.parameters()))
            for inputs, targets in batches():
                alone.zero_grad()
                nn.functional.mse_loss(whole(inputs), targets).backward()
                alone.step()
            first, run = a_run(source, make_optimizer), a_run(target, make_optimizer)
            for batch in batches()[:2]:
                first.step(*batch)
            first.save(folder)
            first.optimizer.state_dict()  # has no state of a parameter that is not in a group
            first.step(*batches()[2])
            run.load(folder)
            for batch in batches()[2:]:
                run.step(*batch)
            run.optimizer.state_dict()
            compare_weights(run, whole, before)
            first.mesh.close()
            run.mesh.close()

"""Runs with several optimizers, such as one for matrices and one for all other parameters, equal
to one process with the same optimizers, schedulers and checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn, optim
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from cases_in_turn import turn
from parallel.worlds.layout_training import compare_weights, sgd
from parallel.worlds.test_layout_checkpoint import shared_folder
from unisono.parallel import Layout
from unisono.parallel.run import ParallelRun, parallelize

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)
WIDTH, STEPS, CLIP = 6, 5, 0.5
Named = list[tuple[str, nn.Parameter]]


def test_several_optimizers(outcome):
    outcome.require_success()


class NormDescent(optim.Optimizer):
    """Divides each gradient by its norm, so that an update depends on a whole parameter."""

    update_unit = "parameter"

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    sums = self.state[each].setdefault("sum", torch.zeros_like(each))
                    sums.add_(each.grad)
                    each.sub_(sums / (sums.norm() + 1e-3), alpha=group["lr"])


def small_model() -> nn.Sequential:
    """Two linear layers, then modules without matrices, which are a stage of their own."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    layers = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(nn.Sequential(*layers), nn.LayerNorm(WIDTH))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(6)
    return [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(STEPS)]


def matrices(named: Named) -> list[nn.Parameter]:
    return [each for _, each in named if each.dim() == 2]


def vectors(named: Named) -> list[nn.Parameter]:
    return [each for _, each in named if each.dim() == 1]


def of_norms(named: Named) -> list[optim.Optimizer]:
    return [NormDescent(matrices(named), 0.1), optim.AdamW(vectors(named), 0.02, eps=1e-3)]


def of_elements(named: Named) -> list[optim.Optimizer]:
    slow = {"params": vectors(named)[:1], "lr": 0.05}
    return [optim.SGD([slow, {"params": vectors(named)[1:]}], 0.3, momentum=0.9),
            optim.Adagrad(matrices(named), 0.05, initial_accumulator_value=0.1)]  # fmt: skip


def of_whole_vectors(named: Named) -> tuple[optim.Optimizer, ...]:
    last = [each for name, each in named if name.startswith("1.")]
    rest = [each for name, each in named if not name.startswith("1.")]
    return NormDescent(last, 0.1), optim.AdamW(rest, 0.02, eps=1e-3, fused=True)


def schedules(optimizers: list[optim.Optimizer]) -> dict[str, optim.lr_scheduler.LRScheduler]:
    return {"first": ExponentialLR(optimizers[0], 0.8), "last": StepLR(optimizers[1], 2, 0.5)}


def train_alone(make: Callable[[Named], list[optim.Optimizer]]) -> tuple[nn.Module, list[float]]:
    model, losses = small_model(), []
    optimizers = make(list(model.named_parameters()))
    steps = schedules(optimizers)
    for inputs, targets in batches():
        model.zero_grad()
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        losses.append(float(loss))
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for each in (*optimizers, *steps.values()):
            each.step()
    return model, losses


def a_run(text: str, make: Callable[..., object], **changes: object) -> ParallelRun:
    options = {"named_optimizer": make, "clip": CLIP, "microbatches": 2} | changes
    return parallelize(small_model(), Layout.parse(text), loss=functional.mse_loss, **options)


def compare(make: Callable[[Named], list[optim.Optimizer]], source: str, target: str) -> None:
    """Trains in one layout, saves, and trains on in another layout."""
    whole, expected = train_alone(make)
    folder, found = shared_folder(), []
    for text, steps in ((source, range(2)), (target, range(2, STEPS))):
        run = a_run(text, make)
        planned = schedules(list(run.optimizers))
        if steps.start:
            run.load(folder, planned)
        for step in steps:
            found.append(float(run.step(*batches()[step])))
            for each in planned.values():
                each.step()
        if steps.start:
            compare_weights(run, whole, small_model())
            report = run.report()
            if make is of_elements and text != "tp=2":  # others add up squares of split parameters
                assert report.bytes_sent == report.predicted.bytes_sent
        else:
            run.save(folder, planned)
        run.mesh.close()
    assert found == pytest.approx(expected, rel=1e-12)


def own_whole_parameters_and_elements(world):
    for source, target in (
        ("dp=2", "dp=2,zero=3"),
        ("dp=2,zero=3", "pp=2"),
        ("pp=2", "dp=2,zero=2"),
        ("dp=2,zero=2", "dp=2"),
    ):
        with turn(source=source, target=target):
            compare(of_norms, source, target)


def own_elements(world):
    for source, target in (
        ("dp=2,zero=1", "tp=2"),
        ("tp=2", "dp=2,zero=3"),
        ("dp=2,zero=3", "pp=2"),
        ("pp=2", "dp=2,zero=1"),
    ):
        with turn(source=source, target=target):
            compare(of_elements, source, target)


def own_whole_parameters_beside_divided_ones(world):
    """Tests an optimizer of whole parameters, of which `tp` divides others."""
    compare(of_whole_vectors, "tp=2", "pp=2")
    compare(of_whole_vectors, "pp=2", "tp=2")


def of_muon(named: Named) -> list[optim.Optimizer]:
    return [optim.Muon(matrices(named), 0.05), optim.AdamW(vectors(named), 0.02)]


def own_muon(world):
    """Muon computes in bfloat16, whose roundings depend on the last digits of a gradient."""
    whole, expected = train_alone(of_muon)
    for text in ("dp=2", "dp=2,zero=2", "dp=2,zero=3", "pp=2"):
        with turn(text=text):
            run = a_run(text, of_muon)
            planned = schedules(list(run.optimizers))
            found = []
            for batch in batches():
                found.append(float(run.step(*batch)))
                for each in planned.values():
                    each.step()
            assert found == pytest.approx(expected, rel=1e-2)
            compare_weights(run, whole, small_model(), tolerance=0.05)
            run.mesh.close()


def own_refusals(world):
    def twice(named: Named) -> list[optim.Optimizer]:
        return [sgd(matrices(named)), sgd(matrices(named)[:1] + vectors(named))]

    cases = (
        ("dp=2,zero=1", of_norms, "zero = 1 .* got NormDescent; zero = 2 works"),
        ("tp=2", of_norms, "NormDescent uses whole parameters, .* a part of 0.0.weight; tp = 1"),
        ("tp=2", of_muon, "Muon uses whole parameters, .* a part of 0.0.weight; tp = 1 works"),
        ("pp=2", twice, "groups 0 and 1 have the same parameter of shape"),
        ("dp=2", lambda named: None, "expected the function to return an .* got NoneType"),
        ("dp=2", lambda named: [], "expected the function to return .* got an empty list"),
        ("dp=2", lambda named: [sgd(vectors(named)), 0.1], "several in a list, got float"),
        ("dp=2", lambda named: [sgd(vectors(named)), optim.LBFGS(matrices(named))],
         "the step of LBFGS needs a closure"),
    )  # fmt: skip
    for text, make, message in cases:
        with turn(text=text, message=message):
            with pytest.raises(ValueError, match=message) as caught:
                a_run(text, make)
            assert "\n" not in str(caught.value)
    run = a_run("dp=2", of_elements)
    with pytest.raises(ValueError, match=r"the run has 2 optimizers; run\.optimizers has them"):
        run.optimizer  # noqa: B018
    run.mesh.close()


def own_stages_without_parameters_of_a_group(world):
    """Tests that a function makes the same groups on all ranks, with marks of parameters."""

    def marked() -> nn.Module:
        model = small_model()
        model[0][0].weight.is_slow = True
        return model

    def by_mark(parameters: list[nn.Parameter]) -> optim.Optimizer:
        slow = [each for each in parameters if getattr(each, "is_slow", False)]
        rest = [each for each in parameters if not getattr(each, "is_slow", False)]
        assert len(slow) == 1 and len(rest) == 5
        return optim.SGD([{"params": slow, "lr": 0.01}, {"params": rest}], 0.5)

    whole = marked()
    before, alone = copy.deepcopy(whole), by_mark(list(whole.parameters()))
    run = parallelize(
        marked(), Layout(pp=2), loss=functional.mse_loss, optimizer=by_mark, microbatches=2
    )
    for inputs, targets in batches():
        alone.zero_grad()
        functional.mse_loss(whole(inputs), targets).backward()
        alone.step()
        run.step(inputs, targets)
    compare_weights(run, whole, before)
    assert [len(group["params"]) > 0 for group in run.optimizer.param_groups] in (
        [True, True],
        [False, True],
    )
    run.mesh.close()

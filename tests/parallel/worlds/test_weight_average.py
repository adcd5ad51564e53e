"""Averages of a run's weights, equal to those of torch's `AveragedModel` in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cases_in_turn import turn
from parallel.worlds.test_exported_weights import exported
from parallel.worlds.test_layout_checkpoint import shared_folder
from parallel.worlds.test_several_optimizers import Named, NormDescent, matrices, vectors
from unisono.parallel import Layout, WeightAverage
from unisono.parallel.run import ParallelRun, parallelize

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)
WIDTH, STEPS, DECAY = 6, 5, 0.7


def test_weight_average(outcome):
    outcome.require_success()


class Sometimes(nn.Module):
    """Uses a layer in some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x) if float(x[0, 0]) > 1 else x


def small_model() -> nn.Sequential:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    return nn.Sequential(
        Sometimes(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
    )


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(6)
    found = [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(STEPS)]
    for step, (inputs, _) in enumerate(found):
        inputs[:, 0] = 2.0 if step in (1, 4) else 0.0
    return found


def by_elements(named: Named) -> optim.Optimizer:
    return optim.AdamW([each for _, each in named], 0.02, eps=1e-3)


def by_norms(named: Named) -> list[optim.Optimizer]:
    return [NormDescent(matrices(named), 0.1), optim.SGD(vectors(named), 0.1)]


def train_alone(make) -> tuple[nn.Module, nn.Module]:
    model = small_model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    made = make(list(model.named_parameters()))
    for inputs, targets in batches():
        model.zero_grad()
        functional.mse_loss(model(inputs), targets).backward()
        for each in made if isinstance(made, list) else [made]:
            each.step()
        average.update_parameters(model)
    return model, average.module


def a_run(text: str, make) -> ParallelRun:
    return parallelize(
        small_model(),
        Layout.parse(text),
        loss=functional.mse_loss,
        named_optimizer=make,
        microbatches=2,
    )


def compare(make, source: str, target: str) -> None:
    """Trains in one layout, saves, and trains on in another layout."""
    model, averaged = train_alone(make)
    folder = shared_folder()
    for text, steps in ((source, range(2)), (target, range(2, STEPS))):
        run = a_run(text, make)
        average = WeightAverage(run, decay=DECAY)
        if steps.start:
            run.load(folder)
        for step in steps:
            run.step(*batches()[step])
        if not steps.start:
            run.save(folder)
            run.mesh.close()
    inputs, targets = batches()[0]
    with average.in_place_of_weights():
        run.export(out := shared_folder())
        found = exported(out)
        loss = float(run.evaluate(inputs, targets))
        with pytest.raises(ValueError, match=r"the averages are in place of the weights"):
            run.step(inputs, targets)
        for call in (run.save, run.async_save, run.load, run.load_weights):
            with pytest.raises(ValueError, match=f"^{call.__name__}: the averages are in place"):
                call(folder)
    for name, each in averaged.named_parameters():
        torch.testing.assert_close(found[name], each.detach(), rtol=0, atol=1e-12)
    assert loss == pytest.approx(float(functional.mse_loss(averaged(inputs), targets)), rel=1e-12)
    loss = float(run.evaluate(inputs, targets))
    assert loss == pytest.approx(float(functional.mse_loss(model(inputs), targets)), rel=1e-12)
    report = run.report()
    if make is by_elements and text == "dp=2":
        assert report.memory["optimizer"] == report.predicted.memory["optimizer"]
    run.step(inputs, targets)
    run.mesh.close()


def own_averages_of_all_layouts(world):
    for source, target in (("dp=2", "dp=2,zero=1"), ("dp=2,zero=1", "dp=2,zero=3"),
                           ("dp=2,zero=3", "tp=2"), ("tp=2", "dp=2")):  # fmt: skip
        with turn(source=source, target=target):
            compare(by_elements, source, target)
    for source, target in (("dp=2,zero=3", "pp=2"), ("pp=2", "dp=2,zero=2")):
        with turn(source=source, target=target):
            compare(by_norms, source, target)


def own_refusals(world):
    run = a_run("dp=2", by_elements)
    for decay in (1.0, -0.1):
        with pytest.raises(ValueError, match="decay: expected a number from 0 to below 1"):
            WeightAverage(run, decay=decay)
    WeightAverage(run, decay=0.5)
    with pytest.raises(ValueError, match="a run without an average"):
        WeightAverage(run, decay=0.5)
    run.step(*batches()[0])
    run.save(folder := shared_folder())
    other = a_run("dp=2,zero=3", by_elements)
    with pytest.raises(ValueError, match=r"expected the optimizer states .*, got .*average"):
        other.load(folder)
    run.mesh.close()
    other.mesh.close()

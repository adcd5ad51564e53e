"""Parameters that are not those of a run: each is refused on all ranks, in one line. Optimizers
with groups by name, and by marks of parameters, train as in one process.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from cases_in_turn import turn
from parallel.worlds.layout_training import compare_model, sgd
from unisono.parallel import Layout
from unisono.parallel.run import ParallelRun, parallelize

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)
WIDTH = 6


def test_foreign_parameters(outcome):
    outcome.require_success()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(6)
    return [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(3)]


def small_model() -> nn.Sequential:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    )


def a_run(text: str, model: nn.Module | None = None, **changes) -> ParallelRun:
    options = {"loss": functional.mse_loss, "optimizer": sgd, "microbatches": 2} | changes
    return parallelize(model or small_model(), Layout.parse(text), **options)


def refused(message: str, begin: Callable[[], ParallelRun]) -> None:
    """Fails unless `parallelize` or the first step raises `ValueError` with one line."""
    inputs, targets = batches()[0]
    with pytest.raises(ValueError, match=message) as caught:
        begin().step(inputs, targets)
    assert "\n" not in str(caught.value)


def own_optimizers_of_parameters_that_are_not_the_runs(world):
    for text, name in (("dp=2,zero=2", "0.weight"), ("dp=2,zero=3", "0.weight"),
                       ("tp=2", "0.weight"), ("pp=2", "")):  # fmt: skip
        with turn(text=text):
            model = small_model()
            former = list(model.parameters())
            refused(
                f"optimizer: group 0 has .*{name}.* as it was before parallelize.*named_optimizer",
                lambda text=text, model=model, former=former: a_run(
                    text, model, optimizer=lambda _: sgd(former)
                ),
            )
    for text in ("dp=2", "dp=2,zero=1", "dp=2,zero=3"):
        with turn(text=text):
            other = nn.Parameter(torch.ones(3))
            refused(
                r"group 0 has a parameter of shape \(3,\) that is not the model's",
                lambda text=text, other=other: a_run(
                    text, optimizer=lambda parameters: sgd([*parameters, other])
                ),
            )


def own_a_fault_of_one_rank_is_told_to_the_other(world):
    """Tests faults that only rank 1 can see."""

    def wrong(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return sgd([*parameters, *([nn.Parameter(torch.ones(3))] * (world.rank == 1))])

    prefix = "^rank 1: " if world.rank == 0 else "^"
    for text in ("dp=2", "pp=2", "dp=2,zero=3"):
        with turn(text=text):
            refused(f"{prefix}optimizer: group 0", lambda text=text: a_run(text, optimizer=wrong))
            run = a_run(text)
            run.step(*batches()[0])
            if world.rank == 1:
                run.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
            weights = [each.detach().clone() for each in run.stages[0][1].parameters()]
            with pytest.raises(
                ValueError, match=r"(^|rank 1 .*: )optimizer: expected the .* arrays"
            ):
                run.step(*batches()[1])
            for before, after in zip(weights, run.stages[0][1].parameters(), strict=True):
                assert torch.equal(before, after.detach())
            if world.rank == 1:
                run.optimizer.param_groups[0]["params"].pop()
            run.step(*batches()[1])
            if world.rank == 1 and text != "dp=2,zero=3":
                parameter = next(iter(run.stages[0][1].parameters()))
                parameter.data = torch.ones(2)
            if text != "dp=2,zero=3":
                with pytest.raises(ValueError, match=r"(^|rank 1 .*: ).* expected data of shape"):
                    run.step(*batches()[1])
                run.step(*batches()[1])
            run.mesh.close()


def own_arrays_that_replace_the_runs(world):
    """Tests an optimizer that has as many arrays as before."""
    run = a_run("dp=2")
    group = run.optimizer.param_groups[0]
    group["params"][0] = nn.Parameter(torch.zeros_like(group["params"][0]))
    with pytest.raises(ValueError, match="of which 1 are others"):
        run.step(*batches()[0])
    run.mesh.close()


class TrainedLoss(nn.Module):
    """A loss with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        return ((output - targets) * self.scale).square().sum(), targets.numel()


class Unregistered(nn.Module):
    """Keeps a parameter in a list, which no module knows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scales = [nn.Parameter(torch.ones(WIDTH))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scales[0]


def own_trained_tensors_outside_of_the_model(world):
    torch.set_default_dtype(torch.float64)
    loss = TrainedLoss()

    def in_a_function(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        return loss(output, targets)

    refused("loss: TrainedLoss has the trained parameter scale", lambda: a_run("dp=2", loss=loss))
    refused("loss: TrainedLoss has", lambda: a_run("dp=2", loss=loss.forward))
    for text in ("dp=2", "dp=2,zero=3", "pp=2"):
        with turn(text=text):
            refused(
                r"trains a tensor of shape \(6,\) that is not one of the model's",
                lambda text=text: a_run(text, loss=in_a_function),
            )
            refused(
                "trains a tensor of shape",
                lambda text=text: a_run(text, nn.Sequential(nn.Tanh(), Unregistered())),
            )
    loss.requires_grad_(False)
    run = a_run("dp=2", loss=loss)
    run.step(*batches()[0])
    run.mesh.close()


def by_name(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Returns an optimizer whose groups have different weight decay and rates."""
    decayed = [each for name, each in named if name.endswith("weight") and "3" not in name]
    first = [each for name, each in named if name in ("0.bias", "3.weight")]
    rest = [each for _, each in named if not any(each is other for other in decayed + first)]
    groups = [
        {"params": decayed, "weight_decay": 0.3},
        {"params": first, "lr": 0.003},
        {"params": rest},
    ]
    return torch.optim.AdamW(groups, 0.01, weight_decay=0.0, eps=1e-3)


def own_groups_by_name(world):
    alone = small_model()
    optimizer = by_name(list(alone.named_parameters()))
    expected = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = functional.mse_loss(alone(inputs), targets)
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    for text in ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "pp=2"):
        with turn(text=text):
            run = a_run(text, optimizer=None, named_optimizer=by_name)
            found = [float(run.step(*batch)) for batch in batches()]
            assert found == pytest.approx(expected, rel=1e-12)
            run.mesh.close()
    with turn(text="torch's own names"):
        run = a_run(
            "dp=2",
            optimizer=None,
            named_optimizer=lambda named: torch.optim.SGD(named, 0.5, momentum=0.9),
        )
        run.step(*batches()[0])
        assert "param_names" not in run.optimizer.param_groups[0]
        run.mesh.close()
    for changes in ({"named_optimizer": by_name}, {"optimizer": None}):
        refused("expected one of optimizer=", lambda changes=changes: a_run("dp=2", **changes))


def by_mark(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    slow = [each for each in parameters if getattr(each, "is_slow", False)]
    rest = [each for each in parameters if not getattr(each, "is_slow", False)]
    return torch.optim.SGD([{"params": slow, "lr": 0.01}, {"params": rest}], 0.5, momentum=0.9)


def own_marks_of_parameters(world):
    """Tests that new parameters have the attributes of those that they replace."""

    def marked() -> nn.Module:
        model = small_model()
        model[0].weight.is_slow = model[2].bias.is_slow = True
        return model

    for text in ("dp=2,zero=1", "dp=2,zero=3", "tp=2"):
        with turn(text=text):
            compare_model(
                text,
                marked,
                lambda: functional.mse_loss,
                batches(),
                clip=None,
                make_optimizer=by_mark,
                unpredicted=("tp",),
            )


def own_data_of_split_parameters(world):
    """Tests that values which a DTensor would ignore are refused, and changes in place are not."""
    for text in ("dp=2,zero=2", "dp=2,zero=3"):
        with turn(text=text):
            run = a_run(text)
            run.step(*batches()[0])
            weight = run.stages[0][1].get_parameter("0.weight")
            for values in (torch.zeros(WIDTH, WIDTH), torch.zeros(2), 0 * weight.data):
                if world.rank == 0:
                    weight.data = values
                with pytest.raises(ValueError, match=r"0\.weight: the program assigned"):
                    run.step(*batches()[1])
            run.step(*batches()[1])
            weight.data.mul_(0)
            expected = functional.mse_loss(run.stages[0][1](batches()[2][0]), batches()[2][1])
            assert float(run.step(*batches()[2])) == pytest.approx(float(expected), rel=1e-12)
            run.mesh.close()

"""Models that use a module twice, outside of its forward pass, or on one rank only."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from cases_in_turn import turn
from parallel.worlds.layout_training import compare_model, expert_shape, sgd, small_shape
from time_limits import limit_s
from unisono.parallel import CrossEntropy, Layout
from unisono.parallel.layers import MixtureOfExperts
from unisono.parallel.run import parallelize

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)
WIDTH = 6


def test_divided_use(outcome):
    outcome.require_success()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(6)
    return [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(3)]


def linears(count: int) -> list[nn.Linear]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def one_linear_twice() -> nn.Module:
    first, last = linears(2)
    return nn.Sequential(first, nn.Tanh(), first, nn.Tanh(), last)


def the_same_linear_on_both_sides() -> nn.Module:
    first, second, third = linears(3)
    return nn.Sequential(first, nn.Tanh(), first, nn.Sequential(second, nn.Tanh(), third))


def one_pair_twice() -> nn.Module:
    first, last = linears(2)
    norm = nn.LayerNorm(WIDTH)
    return nn.Sequential(first, nn.Tanh(), last, norm, first, nn.Tanh(), last)


def one_sequence_twice() -> nn.Module:
    first, last = linears(2)
    pair = nn.Sequential(first, nn.Tanh(), last)
    return nn.Sequential(pair, nn.LayerNorm(WIDTH), pair)


def one_weight_in_two_modules() -> nn.Module:
    first, second, third, fourth = linears(4)
    second.weight = first.weight
    pair = nn.Sequential(third, nn.Tanh(), fourth)
    return nn.Sequential(nn.Sequential(first, nn.Tanh(), nn.Linear(WIDTH, WIDTH)), second, pair)


class Outside(nn.Module):
    """Calls a module of a pair also alone."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third, fourth = linears(4)
        self.alone = first
        self.pairs = nn.Sequential(first, nn.Tanh(), second, nn.LayerNorm(WIDTH), third, fourth)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.alone(self.pairs(x))


def own_linear_layers_in_several_places(world):
    for make_model in (
        one_linear_twice,
        the_same_linear_on_both_sides,
        one_pair_twice,
        one_sequence_twice,
        one_weight_in_two_modules,
        Outside,
    ):
        with turn(make_model=make_model.__name__):
            if make_model is one_linear_twice:  # no pair remains
                refused(make_model, "tp=2", "tp = 2: found nothing to divide")
                continue
            compare_model(
                "tp=2",
                make_model,
                lambda: nn.functional.mse_loss,
                batches(),
                clip=None,
                unpredicted=("tp",),
            )


class Branches(nn.Module):
    """Calls `first` or `second` by the sign of the first feature; `second` may be missing."""

    def __init__(self, has_second: bool, size: int = WIDTH) -> None:
        super().__init__()
        self.base, self.first, self.last = linears(3)
        self.second = nn.Linear(WIDTH, size) if has_second else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.base(x))
        if x[0, 0] > 0:
            inner = inner + self.first(inner)
        elif self.second is not None:
            inner = inner + self.second(inner).sum(1, keepdim=True)
        return self.last(inner)


class Alone(nn.Module):
    """Has one module, which some samples use, so that other ranks gather nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        (self.branch,) = linears(1)
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * (self.branch(x) if x[0, 0] > 0 else x)


class Reading(nn.Module):
    """Uses the weight of a module outside of the module's forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.last = linears(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(torch.tanh(self.base(x)), self.base.weight) + self.last(x)


def refused(make_model: Callable[[], nn.Module], text: str, message: str) -> None:
    """Fails unless `parallelize` or a step soon raises `ValueError` with one line on all ranks."""
    inputs, targets = batches()[0]
    inputs[:4, 0], inputs[4:, 0] = 1, -1  # the samples of each rank
    begin_s = time.monotonic()
    with pytest.raises(ValueError, match=message) as caught:
        run = parallelize(
            make_model(), Layout.parse(text), loss=nn.functional.mse_loss, optimizer=sgd
        )
        for _ in range(2):
            run.step(inputs, targets)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begin_s < limit_s(5)


def own_modules_that_one_rank_calls(world):
    for text in ("dp=2,zero=2", "dp=2,zero=3"):
        for name, make_model in (
            ("one", lambda: Branches(has_second=False)),
            ("equal", lambda: Branches(has_second=True)),
            ("alone", Alone),
            ("longer", lambda: Branches(has_second=True, size=2 * WIDTH)),
        ):
            with turn(text=text, name=name):
                refused(make_model, text, "the ranks called different modules")


def own_weights_outside_of_a_forward_pass(world):
    refused(Reading, "dp=2,zero=3", "uses a parameter of a module that is not called at that time")


def own_dropout_of_torch(world):
    """Tests that ranks of `tp` do not draw different masks for the same samples."""
    first, last = linears(2)
    for name, module in (
        ("Dropout", nn.Dropout(0.1)),
        ("AlphaDropout", nn.AlphaDropout(0.1)),
        ("RReLU", nn.RReLU()),
        ("GRU", nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.5)),
        ("MultiheadAttention", nn.MultiheadAttention(WIDTH, 2, dropout=0.1)),
    ):
        model = nn.Sequential(first, nn.Tanh(), last, module)
        with turn(name=name):
            refused(lambda model=model: model, "tp=2", f"3: {name} draws another mask")
    model = nn.Sequential(first, nn.Tanh(), last, nn.Dropout(0.0))
    run = parallelize(
        model, Layout.parse("tp=2"), loss=nn.functional.mse_loss, optimizer=sgd, microbatches=2
    )
    run.step(*batches()[0])
    run.mesh.close()


class InPlace(nn.Module):
    """Changes the results of its linear layers in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = linears(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x).relu_()
        second = self.second(first)
        second[..., 0] = 0
        return self.last(second.mul_(2).relu_())


def own_modules_that_work_in_place(world):
    """Tests operations in place on results of modules that gather parameters."""
    cubes = [(x.view(4, 2, WIDTH), y.view(4, 2, WIDTH)) for x, y in batches()]
    relu = nn.ReLU(inplace=True)
    for text in ("dp=2,zero=2", "dp=2,zero=3"):
        with turn(text=text):
            first, second, last = linears(3)
            chain = nn.Sequential(first, nn.Tanh(), second, relu, last)
            for make_model in (lambda chain=chain: copy.deepcopy(chain), InPlace):
                compare_model(text, make_model, lambda: nn.functional.mse_loss, cubes, clip=None)
            changing = nn.Sequential(first, nn.Sequential(relu, last))
            refused(lambda changing=changing: changing, text, "inplace=False")


class SomeExperts(nn.Module):
    """Calls its experts for batches whose first token is 0."""

    def __init__(self) -> None:
        super().__init__()
        shape = small_shape(hidden=WIDTH, heads=1, **expert_shape())
        self.table, self.experts = nn.Embedding(11, WIDTH), MixtureOfExperts(shape)
        self.last = nn.Linear(WIDTH, 11)
        for each in self.experts.parameters():
            nn.init.normal_(each)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        return self.last(self.experts(x) if tokens[0, 0] == 0 else x)


def own_experts_that_one_rank_calls(world):
    torch.set_default_dtype(torch.float64)
    tokens = torch.ones(8, 5, dtype=torch.int64)
    tokens[:4] = 0
    for text in ("dp=2,ep=2", "dp=2,ep=2,zero=1", "dp=2,ep=2,zero=2", "dp=2,ep=2,zero=3"):
        with turn(text=text):
            run = parallelize(
                SomeExperts(), Layout.parse(text), loss=CrossEntropy(11), optimizer=sgd
            )
            with pytest.raises(ValueError, match="call the layers of experts on all") as caught:
                run.step(tokens, tokens)
            assert "\n" not in str(caught.value)


class Norms(torch.optim.Optimizer):
    """Divides gradients by their norms."""

    def __init__(self, parameters):
        super().__init__(parameters, {"rate": 0.1})

    @torch.no_grad()
    def step(self):
        for each in self.param_groups[0]["params"]:
            each.sub_(0.1 * each.grad / (each.grad.norm() + 1))


def own_a_second_run_after_the_first_is_closed(world):
    """Tests that torch does not use the groups of the first run, which are destroyed."""
    for _ in range(2):
        compare_model(
            "dp=2,zero=3",
            lambda: nn.Sequential(*linears(2)),
            lambda: nn.functional.mse_loss,
            batches(),
            clip=None,
            make_optimizer=Norms,
            unpredicted=("dp",),  # of which norms of split gradients are no part
        )

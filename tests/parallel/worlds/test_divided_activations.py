"""Modules of programs where the ranks divide activations, and optimizers of divided parameters:
each trains as in one process, or is refused on all ranks.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from cases_in_turn import turn
from parallel.worlds.layout_training import compare_model, sgd, small_shape, token_batches
from unisono.parallel import CrossEntropy, Layout, TransformerModel, parallelize
from unisono.parallel.layers import LayoutDropout

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)
SHAPE = small_shape(layers=2, hidden=8, heads=2, positions=8, tied=False)
WIDTH, CP, SEQUENCE = SHAPE.hidden, "cp=2", "tp=2,sequence_parallel=1"


def test_divided_activations(outcome):
    outcome.require_success()


class Scaled(nn.Module):
    """A residual block of a program with a parameter of its own."""

    is_per_position = True

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.inner(x)


def pair() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 11), nn.Mish(), nn.Linear(11, WIDTH))


def decoder(*inner, last=()) -> nn.Module:
    torch.manual_seed(3)
    modules = [make() for make in inner]
    parts = list(TransformerModel(SHAPE, seed=1))
    return nn.Sequential(*parts[:2], *modules, *parts[2:], *(make() for make in last))


BLOCKS = {
    "linear": (partial(nn.Linear, WIDTH, WIDTH),),
    "norms": (partial(nn.LayerNorm, WIDTH), nn.PReLU, partial(nn.RMSNorm, WIDTH), nn.Softsign),
    "pair": (pair,),
    "block": (lambda: Scaled(nn.Sequential(nn.LayerNorm(WIDTH), pair())),),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),),
    "dropout": (lambda: LayoutDropout(0.4, seed=2, site="block"), partial(nn.Softmax, -1)),
}


def own_modules_of_single_positions(world):
    texts = [(CP, 1), (SEQUENCE, 2)]
    for name, inner in BLOCKS.items():
        for text, microbatches in [*texts, (f"{CP},zero=3", 1)] if name == "block" else texts:
            with turn(text=text, name=name):
                compare_model(
                    text,
                    partial(decoder, *inner),
                    lambda: CrossEntropy(SHAPE.vocab),
                    token_batches(SHAPE),
                    microbatches=microbatches,
                    clip=None,
                    unpredicted=("tp", "cp"),
                )


def own_modules_after_divided_logits(world):
    """Tests modules that need the logits of all words, of which each rank computes a half."""
    for text in ("tp=2", CP):
        with turn(text=text):
            compare_model(
                text,
                partial(decoder, last=(partial(nn.Linear, SHAPE.vocab, SHAPE.vocab),)),
                lambda: CrossEntropy(SHAPE.vocab),
                token_batches(SHAPE),
                unpredicted=("tp",),
            )


def refused(match: str, model: nn.Module, text: str, *, batch=None, optimizer=sgd) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        run = parallelize(
            model, Layout.parse(text), loss=nn.MSELoss(), optimizer=optimizer, microbatches=2
        )
        run.step(*batch)
    assert "\n" not in str(caught.value)


def own_what_cannot_be_known_is_refused(world):
    torch.set_default_dtype(torch.float64)
    for text, cure in ((CP, "dp = 2 without cp works"), (SEQUENCE, "sequence_parallel = 0 works")):
        for make in (partial(nn.GRU, WIDTH, WIDTH), partial(nn.Conv1d, WIDTH, WIDTH, 1)):
            with turn(text=text, make=make):
                refused(f"^2: .* may need whole activations, .*{cure}", decoder(make), text)
    tied = decoder(last=(partial(nn.Linear, SHAPE.vocab, WIDTH, bias=False),))
    tied[-1].weight = nn.Parameter(torch.zeros(WIDTH, SHAPE.vocab))
    tied = nn.Sequential(*tied, nn.Linear(WIDTH, SHAPE.vocab, bias=False))
    tied[-1].weight = tied[0].weight
    refused(r"0\.weight and 5\.weight are one parameter, .* tp = 1 works", tied, "tp=2")
    vectors = nn.Sequential(TransformerModel(SHAPE)[1])
    batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    refused("cp divides dimension 1 .* got torch.float64 of shape", vectors, CP, batch=batch)


def linears() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def vector_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    return [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(3)]


class Signs(torch.optim.Optimizer):
    """Descent by the sign of the gradient and by the size of the parameter."""

    by_size = True

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"rate": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for each in self.param_groups[0]["params"]:
            size = each.numel() if self.by_size else 9
            each.sub_(0.1 * each.grad.sign() / size**0.5)


class ElementSigns(Signs):
    update_unit, by_size = "element", False


class ParameterSigns(Signs):
    update_unit = "parameter"


class Misspelt(Signs):
    update_unit = "elements"


class Averaging(torch.optim.Adam):
    """Adam, with a step that may do more."""

    def step(self, closure=None):
        return super().step(closure)


def own_optimizers_of_divided_parameters(world):
    batches = vector_batches()
    for text, optimizer, match in (
        ("tp=2", Signs, "Signs may use whole .* part of 0.weight; set update_unit = 'element'"),
        ("tp=2", ParameterSigns, "ParameterSigns uses whole parameters, .*; tp = 1 works"),
        ("tp=2", Averaging, "Averaging may use whole parameters"),
        ("tp=2", Misspelt, "update_unit: expected 'element' or 'parameter', got 'elements'"),
        ("pp=2", Signs, "Signs may use several .* = 'parameter' .* dp = 2 without pp works"),
        ("dp=2,zero=1", ElementSigns, "zero = 1 divides parameters"),
        ("dp=2", torch.optim.LBFGS, "the step of LBFGS needs a closure"),
    ):
        with turn(text=text, optimizer=optimizer.__name__):
            refused(match, linears(), text, optimizer=optimizer)
    for text, optimizer in (
        ("tp=2", ElementSigns), ("pp=2", ElementSigns), ("pp=2", ParameterSigns),
        ("dp=2", Signs), ("dp=2,zero=3", Signs),
    ):  # fmt: skip
        with turn(text=text, optimizer=optimizer.__name__):
            compare_model(
                text, linears, nn.MSELoss, batches, microbatches=2, clip=None,
                unpredicted=("tp", "pp", "dp"), make_optimizer=optimizer,
            )  # fmt: skip


def dropping(*before: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    drop = LayoutDropout(0.4, seed=2, site="drop")
    return nn.Sequential(*before, nn.Linear(4, 6), drop, nn.Tanh(), nn.Linear(6, 4))


def own_dropout_of_activations_with_any_positions(world):
    """Tests activations without positions, and with others than dimension 1 of the inputs."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    for shape, before in (((8, 4), ()), ((8, 2, 3, 4), ()), ((8, 2, 3, 4), (nn.Flatten(1, 2),))):
        made = partial(dropping, *before)
        inputs = torch.randn(shape)
        batch = inputs, made()(inputs).detach() + 1
        for text, microbatches in (("dp=2", 2), ("tp=2", 1)):
            with turn(shape=shape, text=text):
                compare_model(
                    text, made, nn.MSELoss, [batch] * 2, microbatches=microbatches,
                    clip=None, unpredicted=("tp",),
                )  # fmt: skip
    merged = dropping(nn.Flatten(0, 1))
    batch = torch.randn(8, 2, 4), torch.randn(8, 2, 4)
    refused("expected the 2 samples of this pass in dimension 0, got 4", merged, "dp=2",
            batch=batch)  # fmt: skip


def own_experts_under_autocast_in_one_process(world):
    """Tests that mixed types neither fail nor change the balance of experts."""
    torch.set_default_dtype(torch.float32)
    shape = small_shape(layers=2, experts=4, top_k=2, expert_ffn=10, tied=False)
    model = TransformerModel(shape, seed=1)
    tokens, targets = token_batches(shape)[0]
    exact = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    found.backward()
    assert float(found.detach()) == pytest.approx(float(exact.detach()), rel=2**-8)
    assert all(each.grad is None or each.grad.dtype == each.dtype for each in model.parameters())

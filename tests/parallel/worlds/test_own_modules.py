"""Modules of programs that divide themselves by the functions of `unisono.parallel.divisible`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from cases_in_turn import turn
from parallel.worlds.layout_training import compare_model, sgd
from unisono.parallel import Layout, divisible
from unisono.parallel.divisible import (
    ContextAttention,
    Divisible,
    copy_to_all,
    cut,
    gather_copies,
    gather_parts,
    keep_part,
    sum_of_all,
    sum_over_tp,
    sum_to_parts,
)
from unisono.parallel.run import parallelize

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
WIDTH, HEADS, HEAD, LENGTH = 12, 4, 3, 8


def test_own_modules(outcome):
    outcome.require_success()


class NormedHeads(nn.Module):
    """Attention with a norm of heads and learned positions, in a residual sum."""

    serves = ("cp",)

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.RMSNorm(HEAD, eps=1e-3)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.mesh, self.group, self.attend = None, None, ContextAttention("ring", None)

    def divide(self, mesh):
        if HEADS % mesh.layout.tp:
            raise ValueError(f"tp: expected a divisor of {HEADS}")
        for each in (self.query, self.key, self.value):
            cut(each, "weight", mesh, dim=0)
            cut(each, "bias", mesh, dim=0)
        cut(self.out, "weight", mesh, dim=1)
        sum_over_tp(self.norm.weight)
        self.mesh, self.group = mesh, mesh.group("tp")
        self.attend = ContextAttention("ring", mesh.group("cp"))

    def forward(self, x):
        own = torch.arange(LENGTH)
        if self.mesh is not None:
            own = divisible.own_positions(self.mesh, length=LENGTH)
        y = copy_to_all(x + self.places[own], self.group)
        heads = [each(y).unflatten(-1, (-1, HEAD)).transpose(1, 2)
                 for each in (self.query, self.key, self.value)]  # fmt: skip
        mixed = self.attend(self.norm(heads[0]), self.norm(heads[1]), heads[2])
        flat = mixed.transpose(1, 2).flatten(2)
        return x + sum_of_all(functional.linear(flat, self.out.weight), self.group) + self.out.bias


class Parts(nn.Module):
    """Divides positions or features inside, by all exchanges of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.group = None

    def divide(self, mesh):
        self.group = mesh.group("tp")
        cut(self.last, "weight", mesh, dim=0)
        cut(self.last, "bias", mesh, dim=0)
        for each in self.first.parameters():
            sum_over_tp(each)

    def forward(self, x):
        length = x.shape[1]
        part = self.first(keep_part(x, self.group, dim=1))  # of the positions
        x = x + gather_copies(part, self.group, dim=1, length=length)
        part = self.first(keep_part(x, self.group, dim=1)).tanh()
        y = self.last(gather_parts(part, self.group, dim=1, length=length))  # of the features
        y = functional.linear(y, self.outer.weight[:, self._columns()])
        y = sum_to_parts(y, self.group, dim=1)
        return x + gather_copies(y, self.group, dim=1, length=length)

    def _columns(self):
        if self.group is None:
            return slice(None)
        rank, count = self.group.rank(), len(self.last.weight)
        return slice(rank * count, (rank + 1) * count)


class Outer(Parts):
    """Sums the gradient of a whole matrix, of which each rank uses some columns."""

    def divide(self, mesh):
        super().divide(mesh)
        sum_over_tp(self.outer.weight)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(6)
    return [(torch.randn(8, LENGTH, WIDTH), torch.randn(8, LENGTH, WIDTH)) for _ in range(3)]


def a_model(*kinds: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(kind() for kind in kinds), nn.Linear(WIDTH, WIDTH))


def own_heads(world):
    assert isinstance(NormedHeads(), Divisible)
    for text in ("dp=2,tp=2,zero=3", "tp=2,cp=2", "pp=2,cp=2", "pp=2,tp=2", "tp=4", "dp=4,zero=1"):
        with turn(text=text):
            compare_model(
                text,
                lambda: a_model(NormedHeads, NormedHeads),
                lambda: functional.mse_loss,
                batches(),
                microbatches=2,
                clip=None,
                unpredicted=("tp", "cp", "pp"),
            )


def own_parts(world):
    for text in ("dp=2,tp=2,zero=1", "pp=2,tp=2", "tp=4"):
        with turn(text=text):
            compare_model(
                text,
                lambda: a_model(Outer, Outer),
                lambda: functional.mse_loss,
                batches(),
                microbatches=2,
                clip=None,
                unpredicted=("tp", "pp"),
            )


def own_refusals(world):
    torch.set_default_dtype(torch.float64)

    class OnOneRank(Parts):
        def divide(self, mesh):
            if world.rank == 1:
                raise ValueError("parts: not on this rank")

    prefix = "^" if world.rank == 1 else "^rank 1: "
    for text, kind, message in (
        ("cp=4", Outer, "Outer may need whole activations, but cp = 4 .* serves = "),
        ("tp=4", OnOneRank, f"{prefix}parts: not on this rank"),
    ):
        with turn(text=text), pytest.raises(ValueError, match=message) as caught:
            parallelize(a_model(kind), Layout.parse(text), loss=functional.mse_loss, optimizer=sgd)
        assert "\n" not in str(caught.value)


def own_second_derivatives(world):
    """A backward pass sends gradients, which has no derivative of its own."""
    x = torch.ones(RANKS, requires_grad=True)
    group = torch.distributed.group.WORLD
    for exchange in (
        lambda x: copy_to_all(x, group),
        lambda x: gather_parts(sum_to_parts(x, group, dim=0), group, dim=0, length=RANKS),
        lambda x: gather_copies(keep_part(x, group, dim=0), group, dim=0, length=RANKS),
    ):
        (first,) = torch.autograd.grad(exchange(x).pow(3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            first.sum().backward()

"""Blocks with unusual parameters: shared, tied, frozen, unused, of several types and shapes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from random_models.block import ROUNDED, Block, block


class Twice(nn.Module):
    """Calls one module twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(torch.tanh(self.inner(x)))


class Tied(nn.Module):
    """Two linear layers with one matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Borrowed(nn.Module):
    """Uses the matrix of a module that is not called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.owner = nn.Linear(width, width)

    def forward(self, x):
        return functional.linear(x, self.owner.weight.t())


class Unused(nn.Module):
    """Has a module and a parameter that no forward pass uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.used = nn.Linear(width, width)
        self.never = nn.Linear(width, 3)
        self.lonely = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.used(x)


class SometimesUsed(nn.Module):
    """Applies a module to some positions only, and does not call it if there are none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.extra = nn.Linear(width, width)

    def forward(self, x):
        chosen = x.detach()[..., 0] > 0.8
        if not bool(chosen.any()):
            return x
        y = x.clone()
        y[chosen] = self.extra(x[chosen])
        return y


class Parameter(nn.Module):
    """Multiplies by a function of one parameter."""

    def __init__(self, values: torch.Tensor, *, requires_grad: bool = True) -> None:
        super().__init__()
        self.values = nn.Parameter(values, requires_grad=requires_grad)

    def forward(self, x):
        values = self.values
        if values.is_complex():
            values = values.abs()
        return x * (1 + values.to(x.dtype).sum() / 8)


class Mixed(nn.Module):
    """A linear layer of another type, with casts around it."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, dtype=dtype)

    def forward(self, x):
        return self.inner(x.to(self.inner.weight.dtype)).to(x.dtype)


class Lists(nn.Module):
    """Parameters in a list and in a dictionary."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList([torch.ones(width), torch.full((width,), 0.5)])
        self.named = nn.ParameterDict({"bias": torch.zeros(width)})

    def forward(self, x):
        return x * self.factors[0] * self.factors[1] + self.named["bias"]


class Lookup(nn.Module):
    """Adds rows of a table, chosen by the sign and size of one feature."""

    def __init__(self, width: int, **options: object) -> None:
        super().__init__()
        self.table = nn.Embedding(5, width, **options)

    def forward(self, x):
        ids = (x.detach()[..., 0] * 2).round().clamp(-2, 2).long() + 2
        return x + self.table(ids)


class Expanded(nn.Linear):
    """A subclass of nn.Linear with a forward of its own."""

    def forward(self, x):
        return super().forward(x) * 0.5 + x


def _frozen(width: int) -> nn.Module:
    return nn.Linear(width, width).requires_grad_(False)


def _frozen_weight(width: int) -> nn.Module:
    made = nn.Linear(width, width)
    made.weight.requires_grad_(False)
    return made


def _transposed(width: int) -> nn.Module:
    made = nn.Linear(width, width)
    made.weight = nn.Parameter(torch.empty(width, width).normal_(std=0.4).t())
    return made


def _masked(width: int) -> nn.Module:
    """A linear layer whose hook zeroes gradients of half of its rows."""
    made = nn.Linear(width, width)
    made.weight.register_hook(lambda g: g * (torch.arange(width) % 2).unsqueeze(1))
    return made


def _clamped(width: int) -> nn.Module:
    """A linear layer whose hook limits each element of the gradient: not linear in its parts."""
    made = nn.Linear(width, width)
    made.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return made


def _halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)


def _counting(width: int) -> nn.Module:
    """A linear layer with a hook after the accumulation of a gradient."""
    made = nn.Linear(width, width)
    made.bias.register_post_accumulate_grad_hook(_halve)
    return made


def _tied_apart(width: int) -> list[nn.Module]:
    first, last = nn.Linear(width, width), nn.Linear(width, width, bias=False)
    last.weight = first.weight
    return [first, nn.Tanh(), nn.LayerNorm(width), last]


def _between(kind):
    """Two linear layers that are changed by `kind`, with an activation between them."""
    return block(
        lambda w: kind(nn.Linear(w, w + 2)),
        lambda _: nn.ReLU(),
        lambda w: kind(nn.Linear(w + 2, w)),
    )


PARAMETER_BLOCKS: dict[str, Block] = {
    "twice": block(lambda w: Twice(nn.Linear(w, w))),
    "shared": Block(make=lambda w: [each := nn.Linear(w, w), nn.Tanh(), each]),
    "tied": block(Tied),
    "tied_apart": Block(make=_tied_apart),
    "borrowed": block(Borrowed),
    "unused": block(Unused),
    "sometimes_used": block(SometimesUsed),
    "frozen": block(_frozen),
    "frozen_weight": block(_frozen_weight),
    "scalar": block(lambda _: Parameter(torch.tensor(0.3))),
    "empty": block(lambda _: Parameter(torch.empty(0))),
    "complex": block(lambda _: Parameter(torch.ones(3, dtype=torch.complex128))),
    "whole_numbers": block(lambda _: Parameter(torch.arange(3), requires_grad=False)),
    "float32": block(lambda w: Mixed(w, torch.float32), tolerance=ROUNDED),
    "lists": block(Lists),
    "lookup": block(Lookup),
    "max_norm": block(lambda w: Lookup(w, max_norm=0.7)),
    "scale_by_frequency": block(lambda w: Lookup(w, scale_grad_by_freq=True)),
    "padding_index": block(lambda w: Lookup(w, padding_idx=2)),
    "sparse": block(lambda w: Lookup(w, sparse=True)),
    "subclass": block(lambda w: Expanded(w, w), lambda _: nn.ReLU(), lambda w: Expanded(w, w)),
    "transposed": block(_transposed),
    "pruned": _between(lambda each: prune.random_unstructured(each, "weight", 0.4)),
    "weight_norm": _between(parametrizations.weight_norm),
    "spectral_norm": _between(parametrizations.spectral_norm),
    "old_spectral_norm": _between(nn.utils.spectral_norm),
    "orthogonal": _between(parametrizations.orthogonal),
    "gradient_mask": block(_masked),
    "gradient_clamp": block(_clamped),
    "gradient_mask_in_pair": block(_masked, lambda _: nn.ReLU(), _masked),
    "after_gradient": block(_counting),
    "lazy": block(nn.LazyLinear),
}

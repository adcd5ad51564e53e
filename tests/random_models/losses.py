"""Kinds of losses: modules, functions and lambdas; means, sums, weights and masks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from unisono.parallel import CrossEntropy

_PAD = 0
_WEIGHTS = (0.5, 1.0, 2.0, 0.25, 3.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossKind:
    """A kind of loss."""

    make: Callable[[], Callable[..., torch.Tensor]]
    targets: str = "classes"
    """Kind of targets: "classes", "floats", "probabilities" or "bits"."""
    ignored: int = -100
    """The target that the loss ignores."""
    channels: bool = False
    """Whether the classes must be dimension 1 of the results."""


class Tempered(nn.Module):
    """A cross entropy with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, logits, targets):
        return _flat(functional.cross_entropy)(logits / self.temperature, targets)


class Counting(nn.Module):
    """A mean that counts its calls in a buffer, and grows with them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, logits, targets):
        self.calls += 1
        return _flat(functional.cross_entropy)(logits, targets) * (1 + 0.1 * self.calls)


class CountingPairs(Counting):
    """As `Counting`, with the sum and the weight of each part of a batch."""

    def forward(self, logits, targets):
        self.calls += 1
        total = _flat(functional.cross_entropy, reduction="sum")(logits, targets)
        return total * (1 + 0.1 * self.calls), (targets != -100).sum()


def _flat(function: Callable[..., torch.Tensor], **options: object):
    """Returns a loss of (..., classes) and (...) from a loss of (n, classes) and (n)."""

    def loss(logits, targets):
        return function(logits.flatten(0, -2), targets.flatten(), **options)

    return loss


def _shifted(logits, targets):
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def _mask_mean(logits, targets):
    each = functional.cross_entropy(
        logits.flatten(0, -2), targets.flatten().clamp_min(0), reduction="none"
    )
    mask = (targets.flatten() != _PAD).to(each.dtype)
    return (each * mask).sum() / mask.sum()


def _samples_mean(logits, targets):
    """The mean over samples of each sample's mean over its valid targets."""
    each = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    each, valid = each.view(targets.shape), (targets != -100).to(each.dtype)
    if each.dim() == 1:
        return (each * valid).sum() / valid.sum()
    return (each.sum(dim=1) / valid.sum(dim=1).clamp_min(1)).mean()


def _weighted(logits, targets):
    weight = torch.tensor(_WEIGHTS, dtype=logits.dtype)
    return _flat(functional.cross_entropy, weight=weight)(logits, targets)


def _partial():
    return functools.partial(functional.cross_entropy, ignore_index=_PAD)


def _root(x, y):
    return functional.mse_loss(x, y).sqrt()


def _logits(function):
    """Returns a loss of the first or the named result."""

    def loss(results, targets):
        found = results["logits"] if isinstance(results, dict) else results[0]
        return function(found, targets)

    return loss


def _with_penalty(logits, targets):
    """A sum and its weight, of a cross entropy and of a penalty on large logits."""
    each = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    valid = (targets.flatten() != -100).to(each.dtype)
    penalty = logits.flatten(0, -2).square().mean(dim=-1)
    return ((each + 0.1 * penalty) * valid).sum(), valid.sum()


def _penalised_squares(x, y):
    return functional.mse_loss(x, y) + 0.1 * functional.l1_loss(x, y)


def _float(value: float) -> Callable[..., float]:
    return lambda x, y: float(functional.mse_loss(x, y)) + value


def _channels(make: Callable[[], Callable[..., torch.Tensor]], **options: object) -> LossKind:
    return LossKind(make=make, channels=True, **options)


def _floats(make: Callable[[], Callable[..., torch.Tensor]]) -> LossKind:
    return LossKind(make=make, targets="floats")


LOSSES: dict[str, LossKind] = {
    "cross_entropy": LossKind(make=CrossEntropy),
    "sized_cross_entropy": LossKind(make=lambda: CrossEntropy(5)),
    "decoder_cross_entropy": LossKind(make=lambda: CrossEntropy(7)),
    "flat": LossKind(make=lambda: _flat(functional.cross_entropy)),
    "flat_lambda": LossKind(
        make=lambda: lambda x, y: functional.cross_entropy(x.flatten(0, -2), y.flatten())
    ),
    "flat_pad": LossKind(
        make=lambda: _flat(functional.cross_entropy, ignore_index=_PAD), ignored=_PAD
    ),
    "flat_sum": LossKind(make=lambda: _flat(functional.cross_entropy, reduction="sum")),
    "flat_weights": LossKind(make=lambda: _weighted),
    "flat_smooth": LossKind(make=lambda: _flat(functional.cross_entropy, label_smoothing=0.1)),
    "shifted": LossKind(make=lambda: _shifted),
    "mask_mean": LossKind(make=lambda: _mask_mean, ignored=_PAD),
    "samples_mean": LossKind(make=lambda: _samples_mean),
    "with_penalty": LossKind(make=lambda: _with_penalty),
    "tempered": LossKind(make=Tempered),
    "counting": LossKind(make=Counting),
    "counting_pairs": LossKind(make=CountingPairs),
    "module": _channels(nn.CrossEntropyLoss),
    "function": _channels(lambda: functional.cross_entropy),
    "module_pad": _channels(lambda: nn.CrossEntropyLoss(ignore_index=_PAD), ignored=_PAD),
    "module_sum": _channels(lambda: nn.CrossEntropyLoss(reduction="sum")),
    "module_none": _channels(lambda: nn.CrossEntropyLoss(reduction="none")),
    "module_weights": _channels(
        lambda: nn.CrossEntropyLoss(torch.tensor(_WEIGHTS, dtype=torch.float64))
    ),
    "module_smooth": _channels(lambda: nn.CrossEntropyLoss(label_smoothing=0.1)),
    "partial_pad": _channels(_partial, ignored=_PAD),
    "log_likelihood": _channels(
        lambda: lambda x, y: functional.nll_loss(functional.log_softmax(x, dim=1), y)
    ),
    "squares": _floats(lambda: functional.mse_loss),
    "squares_module": _floats(nn.MSELoss),
    "squares_sum": _floats(lambda: lambda x, y: functional.mse_loss(x, y, reduction="sum")),
    "squares_sum_module": _floats(lambda: nn.MSELoss(reduction="sum")),
    "root": _floats(lambda: _root),
    "absolute": _floats(nn.L1Loss),
    "huber": _floats(nn.HuberLoss),
    "written_mean": _floats(lambda: lambda x, y: ((x - y) ** 2).mean()),
    "written_sum": _floats(lambda: lambda x, y: ((x - y) ** 2).sum()),
    "sum_over_samples": _floats(lambda: lambda x, y: ((x - y) ** 2).sum() / len(x)),
    "squares_and_penalty": _floats(lambda: _penalised_squares),
    "vector": _floats(lambda: lambda x, y: (x - y) ** 2),
    "plain_number": _floats(lambda: _float(0.0)),
    "bits": LossKind(make=nn.BCEWithLogitsLoss, targets="bits"),
    "weighted_bits": LossKind(
        make=lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), targets="bits"
    ),
    "soft_targets": _channels(nn.CrossEntropyLoss, targets="probabilities"),
    "divergence": LossKind(
        make=lambda: (
            lambda x, y: functional.kl_div(x.log_softmax(dim=-1), y, reduction="batchmean")
        ),
        targets="probabilities",
    ),
}


def make_loss(name: str, container: str) -> Callable[..., torch.Tensor]:
    """Returns the loss of this name, for the results of models in this container."""
    made = LOSSES[name].make()
    return _logits(made) if container in ("dict_result", "tuple_result") else made

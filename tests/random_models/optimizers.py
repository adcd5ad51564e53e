"""Kinds of optimizers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn, optim

_EPSILON = 1e-4
"""Large, so that gradients that are zero except for rounding errors do not move weights."""


def _groups(parameters: list[nn.Parameter]) -> optim.Optimizer:
    """Two groups, by the number of dimensions, as training programs decay matrices only."""
    matrices = [each for each in parameters if each.dim() > 1]
    others = [each for each in parameters if each.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 0.05},
    ]
    return optim.AdamW([group for group in groups if group["params"]], 0.02, eps=_EPSILON)


class Halving(optim.Optimizer):
    """An optimizer of a program: adds the negative gradient, divided by the parameter's size."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad * group["lr"] / each.numel() ** 0.5)


MAGNIFYING = ("adafactor",)
"""Optimizers that turn the rounding errors of gradients of zero into large steps."""

PROPORTIONAL = ("sgd", "momentum", "decay", "own")
"""Optimizers whose steps are proportional to gradients: they do not magnify small errors. Autocast
makes larger errors."""

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], optim.Optimizer]] = {
    "sgd": lambda each: optim.SGD(each, 0.1),
    "momentum": lambda each: optim.SGD(each, 0.1, momentum=0.9, nesterov=True),
    "decay": lambda each: optim.SGD(each, 0.1, weight_decay=0.1),
    "adamw": lambda each: optim.AdamW(each, 0.02, eps=_EPSILON),
    "amsgrad": lambda each: optim.Adam(each, 0.02, eps=_EPSILON, amsgrad=True),
    "groups": _groups,
    "fused": lambda each: optim.AdamW(each, 0.02, eps=_EPSILON, fused=True),
    "rmsprop": lambda each: optim.RMSprop(each, 0.01, eps=_EPSILON),
    "adagrad": lambda each: optim.Adagrad(each, 0.05, eps=_EPSILON),
    "adadelta": lambda each: optim.Adadelta(each, 0.5, eps=_EPSILON),
    "adamax": lambda each: optim.Adamax(each, 0.02, eps=_EPSILON),
    "nadam": lambda each: optim.NAdam(each, 0.02, eps=_EPSILON),
    "averaged": lambda each: optim.ASGD(each, 0.05),
    "adafactor": lambda each: optim.Adafactor(each, 0.02),
    "own": Halving,
    "tensor_rate": lambda each: optim.AdamW(each, torch.tensor(0.02), eps=_EPSILON),
}

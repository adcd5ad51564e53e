"""The optimizer that a program's function makes of the parameters of this rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn, optim

from unisono.parallel.run.parameter_sets import HeldParameter

Named = list[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[list[nn.Parameter]], optim.Optimizer]
MakeNamedOptimizer = Callable[[Named], optim.Optimizer]


class FormerParameters:
    """The names of the parameters that a model had before it was divided. Keeps none alive."""

    def __init__(self, model: nn.Module) -> None:
        self._names = [(weakref.ref(each), name) for name, each in model.named_parameters()]

    def name(self, parameter: object) -> str | None:
        """Returns the name that a parameter had in the whole model; None for others."""
        return next((name for held, name in self._names if held() is parameter), None)


def check_functions(optimizer: object, named_optimizer: object) -> None:
    """Raises `ValueError` unless exactly one function that makes an optimizer is given."""
    if (optimizer is None) == (named_optimizer is None):
        raise ValueError(
            "expected one of optimizer=function(parameters) and named_optimizer=function(pairs of "
            f"name and parameter), got {'neither' if optimizer is None else 'both'}"
        )


def build_optimizer(
    optimizer: MakeOptimizer | None,
    named_optimizer: MakeNamedOptimizer | None,
    trained: Sequence[HeldParameter],
    frozen: Sequence[HeldParameter],
    former: FormerParameters,
) -> optim.Optimizer:
    """Makes the optimizer of this rank's trained parameters.

    Raises `ValueError` if the optimizer has a parameter that is neither trained nor frozen by the
    run: its gradient would not be summed over the ranks, or it would not be trained.
    """
    # a stage may train nothing, but optimizers need a parameter
    spare = nn.Parameter(torch.empty(0))
    pairs = [(each.name, each.values) for each in trained] or [("no_parameter", spare)]
    if named_optimizer is not None:
        built = named_optimizer(pairs)
    else:
        assert optimizer is not None
        built = optimizer([each for _, each in pairs])
    known = {id(each.values) for each in (*trained, *frozen)} | {id(spare)}
    for number, group in enumerate(built.param_groups):
        for each in group["params"]:
            if id(each) not in known:
                raise ValueError(_foreign(number, each, former))
    if isinstance(built, optim.SparseAdam):
        raise ValueError(
            "optimizer: SparseAdam updates the rows of sparse gradients, but gradients are summed "
            "over ranks and microbatches as whole arrays; expected another optimizer, such as Adam"
        )
    _drop_names(built)
    return built


def _foreign(group: int, parameter: torch.Tensor, former: FormerParameters) -> str:
    name = former.name(parameter)
    if name is not None:
        return (
            f"optimizer: group {group} has {name} as it was before parallelize, which gives this "
            "rank another parameter or none in its place; make the groups of the parameters that "
            "the function receives (with names: named_optimizer=)"
        )
    return (
        f"optimizer: group {group} has a parameter of shape {tuple(parameter.shape)} that is not "
        "the model's, so its gradient would not be summed over the ranks; make it a parameter of "
        "the model, and make the groups of the parameters that the function receives"
    )


def _drop_names(optimizer: optim.Optimizer) -> None:
    """Removes the names that torch keeps beside the parameters, because arrays replace these."""
    for group in optimizer.param_groups:
        group.pop("param_names", None)

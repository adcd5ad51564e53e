"""The optimizers that a program's function makes of the parameters of this rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn, optim

from unisono.parallel.run.optimizers import Optimizers
from unisono.parallel.run.parameter_sets import HeldParameter

Named = list[tuple[str, nn.Parameter]]
Made = optim.Optimizer | Sequence[optim.Optimizer]
MakeOptimizer = Callable[[list[nn.Parameter]], Made]
MakeNamedOptimizer = Callable[[Named], Made]

_INTERFACE = ("param_groups", "state", "step")


class FormerParameters:
    """The parameters that a model had before it was divided. Keeps none of them alive."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        self._names = [(weakref.ref(each), name) for name, each in named]
        self.absent = {name: _without_memory(each) for name, each in named if each.requires_grad}
        """By name: what stands for each trained parameter on ranks without it."""

    def name(self, parameter: object) -> str | None:
        """Returns the name that a parameter had in the whole model; None for others."""
        return next((name for held, name in self._names if held() is parameter), None)


def check_functions(optimizer: object, named_optimizer: object) -> None:
    """Raises `ValueError` unless exactly one function that makes optimizers is given."""
    for name, given in (("optimizer", optimizer), ("named_optimizer", named_optimizer)):
        if given is not None and not callable(given):
            raise ValueError(
                f"{name}: expected a function that makes an optimizer of parameters, such as "
                f"lambda parameters: AdamW(parameters, 1e-3), got {type(given).__name__}"
            )
    if (optimizer is None) == (named_optimizer is None):
        raise ValueError(
            "expected one of optimizer=function(parameters) and named_optimizer=function(pairs of "
            f"name and parameter), got {'neither' if optimizer is None else 'both'}"
        )


def build_optimizers(
    optimizer: MakeOptimizer | None,
    named_optimizer: MakeNamedOptimizer | None,
    trained: Sequence[HeldParameter],
    frozen: Sequence[HeldParameter],
    former: FormerParameters,
) -> Optimizers:
    """Makes the optimizers of this rank's trained parameters.

    The function gets all trained parameters of the model, in its order, so that it makes the same
    optimizers and groups on all ranks. Those of other stages of a pipeline have no memory, and are
    taken out of the groups again.

    Raises `ValueError` if it returns no optimizer, if two groups have the same parameter, or if a
    group has a parameter that is neither trained nor frozen by the run: its gradient would not be
    summed over the ranks, or it would not be trained.
    """
    held = {each.name: each.values for each in trained}
    absent = {name: each for name, each in former.absent.items() if name not in held}
    pairs = [(name, held.get(name, each)) for name, each in former.absent.items()]
    if not pairs:  # optimizers need a parameter
        absent = {"no_parameter": nn.Parameter(torch.empty(0))}
        pairs = list(absent.items())
    if named_optimizer is not None:
        made = named_optimizer(pairs)
    else:
        assert optimizer is not None
        made = optimizer([each for _, each in pairs])
    built = Optimizers(_required(made))
    known = [each.values for each in (*trained, *frozen)]
    _check_groups(built, {*map(id, known), *map(id, absent.values())}, former)
    for each in built.each:
        if isinstance(each, optim.SparseAdam):
            raise ValueError(
                "optimizer: SparseAdam updates the rows of sparse gradients, but gradients are "
                "summed over ranks and microbatches as whole arrays; expected another optimizer, "
                "such as Adam"
            )
    _take_out(built, absent.values())
    return built


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    """Returns a parameter of the same shape, type and attributes, with memory for one element. Its
    device is the CPU, since some optimizers refuse parameters on the device meta."""
    one = torch.zeros((), dtype=parameter.dtype, device="cpu")
    found = nn.Parameter(one.expand(parameter.shape))
    vars(found).update(vars(parameter))  # a program may have marked the parameter
    return found


def _required(made: object) -> Sequence[optim.Optimizer]:
    """Returns the optimizers that a function has returned."""
    found: list[Any] = list(made) if isinstance(made, list | tuple) else [made]
    wrong = [each for each in found if not all(hasattr(each, name) for name in _INTERFACE)]
    if wrong or not found:
        got = type(wrong[0]).__name__ if wrong else "an empty list"
        raise ValueError(
            "optimizer: expected the function to return an optimizer, or several in a list, got "
            f"{got}"
        )
    return found


def _check_groups(built: Optimizers, known: set[int], former: FormerParameters) -> None:
    groups: dict[int, int] = {}
    for number, group in enumerate(built.groups):
        for each in group["params"]:
            if id(each) not in known:
                raise ValueError(_foreign(number, each, former))
            if id(each) in groups:
                raise ValueError(
                    f"optimizer: groups {groups[id(each)]} and {number} have the same parameter of "
                    f"shape {tuple(each.shape)}; expected each parameter in one group of one "
                    "optimizer"
                )
            groups[id(each)] = number


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


def _take_out(built: Optimizers, absent: Iterable[nn.Parameter]) -> None:
    """Removes the parameters that this rank does not have, and the names that torch keeps beside
    the parameters, because arrays replace these."""
    numbers = set(map(id, absent))
    for each in absent:
        built.forget(each)
    for group in built.groups:
        group.pop("param_names", None)
        group["params"] = [each for each in group["params"] if id(each) not in numbers]

"""The optimizers that a program's function makes of the parameters of this rank.

An optimizer that uses more of the parameters than a rank has is refused. It updates each element
alone, or each parameter alone, of which it may use rows and the norm. This is known for classes of
torch, and a program's class declares it as `update_unit`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from unisono.parallel.run.parameters.optimizers import Optimizers
from unisono.parallel.run.parameters.parameter_sets import HeldParameter, ParameterSet
from unisono.planner import Layout

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adagrad,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)
_OF_PARAMETERS = (optim.Adafactor, optim.Muon)
_DECLARED = "update_unit"


def check_optimizers(
    optimizers: Optimizers, trained: Sequence[HeldParameter], layout: Layout
) -> None:
    """Raises `ValueError` for an optimizer that may use more than this rank has: whole parameters,
    if the rank has parts of them, or the parameters of other stages of a pipeline.
    """
    for each in optimizers.each:
        own = {id(parameter) for group in each.param_groups for parameter in group["params"]}
        _check(each, [held for held in trained if id(held.values) in own], layout)


def _check(optimizer: optim.Optimizer, trained: Sequence[HeldParameter], layout: Layout) -> None:
    kind, unit = type(optimizer), _unit(optimizer)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer: the step of {kind.__name__} needs a closure, which computes the loss "
            "again, but a run computes it once in a step; expected an optimizer whose step needs "
            "no closure, such as AdamW"
        )
    if isinstance(optimizer, optim.SparseAdam):
        raise ValueError(
            "optimizer: SparseAdam updates the rows of sparse gradients, but gradients are summed "
            "over ranks and microbatches as whole arrays; expected another optimizer, such as Adam"
        )
    if layout.zero == 1 and kind not in ELEMENTWISE:
        names = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise ValueError(
            f"zero = 1 divides parameters, so it needs one of torch's optimizers that treat "
            f"each element alone ({names}), got {kind.__name__}; zero = 2 works"
        )
    if unit is None and layout.pp > 1:
        raise ValueError(
            f"{kind.__name__} may use several parameters together, but with pp = {layout.pp} a rank"
            f" has those of its stages; set {_DECLARED} = 'parameter' in the class if its step "
            f"treats each parameter alone; dp = {layout.dp * layout.pp} without pp works"
        )
    for held in trained:
        _check_held(kind, unit, held)


def _check_held(kind: type[optim.Optimizer], unit: str | None, held: HeldParameter) -> None:
    # torch's Adafactor has no operations on split matrices (DTensor)
    if kind is optim.Adafactor and isinstance(held.values, DTensor):
        raise ValueError(
            f"{kind.__name__} uses whole parameters, but each rank has a part of {held.name}; "
            "zero = 0 works"
        )
    if unit == "element" or tuple(held.values.shape) == held.block.shape:
        return
    axis = {"expert_tokens": "ep", "own": "dp"}.get(held.block.summed_over, "tp")
    uses = "may use" if unit is None else "uses"
    cure = f"set {_DECLARED} = 'element' in the class if its step treats each element alone; "
    raise ValueError(
        f"{kind.__name__} {uses} whole parameters, but each rank has a part of {held.name}; "
        f"{cure if unit is None else ''}{axis} = 1 works"
    )


def _unit(optimizer: optim.Optimizer) -> str | None:
    """Returns what an optimizer updates alone, 'element' or 'parameter'; None if not known."""
    if type(optimizer) in ELEMENTWISE:
        return "element"
    if type(optimizer) in _OF_PARAMETERS:
        return "parameter"
    found: str | None = getattr(optimizer, _DECLARED, None)
    if found not in (None, "element", "parameter"):
        raise ValueError(
            f"{type(optimizer).__name__}.{_DECLARED}: expected 'element' or 'parameter', got "
            f"{found!r}"
        )
    return found


Named = list[tuple[str, nn.Parameter]]
Made = optim.Optimizer | Sequence[optim.Optimizer]
MakeOptimizer = Callable[[list[nn.Parameter]], Made]
MakeNamedOptimizer = Callable[[Named], Made]


class FormerParameters:
    """The parameters that a model had before it was divided. Keeps none of them alive."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        self.names = [(weakref.ref(each), name) for name, each in named]
        self.absent = {name: _without_memory(each) for name, each in named if each.requires_grad}
        """By name: what stands for each trained parameter on ranks without it."""


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
    numbers = set(map(id, absent.values()))
    _check_groups(built, {*map(id, known), *numbers}, former)
    for each in absent.values():
        built.forget(each)
    for group in built.groups:
        group.pop("param_names", None)  # those of parameters, which arrays replace
        group["params"] = [each for each in group["params"] if id(each) not in numbers]
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
    interface = ("param_groups", "state", "step")
    wrong = [each for each in found if not all(hasattr(each, name) for name in interface)]
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
    name = next((name for held, name in former.names if held() is parameter), None)
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


def unmerged_parameters(optimizers: Optimizers) -> set[nn.Parameter]:
    """Returns the parameters of optimizers that may use the rows or the norm of a parameter, such
    as Muon and Adafactor."""
    return {
        parameter
        for each in optimizers.each
        if type(each) not in ELEMENTWISE
        for group in each.param_groups
        for parameter in group["params"]
    }


def merge_parameters(optimizers: Optimizers, sets: Sequence[ParameterSet]) -> None:
    """Replaces the optimizers' parameters by plain arrays that hold the same elements.

    Each parameter costs an optimizer about 30 us for a step, and a DTensor 170 us, so that a step
    on few plain arrays is faster. The `unmerged_parameters`, which are in sets of their own, stay.
    """
    unmerged = unmerged_parameters(optimizers)
    groups = {
        parameter: number
        for number, group in enumerate(optimizers.groups)
        for parameter in group["params"]
    }
    for each in sets:
        former = set(each.trained)
        if former & unmerged:
            continue
        arrays = each.merge(groups)
        for number, group in enumerate(optimizers.groups):
            kept = [parameter for parameter in group["params"] if parameter not in former]
            group["params"] = kept + [array for array, place in arrays if place == number]
    for optimizer in optimizers.each:
        if type(optimizer) is optim.Adagrad:  # it makes its states at once
            first = optimizer.defaults["initial_accumulator_value"]
            groups_of_arrays = [dict(group) for group in optimizer.param_groups]
            fresh = optim.Adagrad(groups_of_arrays, initial_accumulator_value=first)
            optimizer.state.clear()
            optimizer.state.update(fresh.state)

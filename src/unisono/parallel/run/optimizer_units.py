"""Refusal of optimizers that use more of the parameters than a rank has.

An optimizer updates each element alone, or each parameter alone, of which it may use rows and the
norm. It is known for classes of torch, and a program's class declares it as `update_unit`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import optim
from torch.distributed.tensor import DTensor

from unisono.parallel.run.optimizers import Optimizers
from unisono.parallel.run.parameter_sets import HeldParameter
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
_UNITS = ("element", "parameter")


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
    _check_closure(optimizer)
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
    axes = {"expert_tokens": "ep", "own": "dp"}
    axis = axes.get(held.block.summed_over, "tp")
    uses, cure = "uses", ""
    if unit is None:
        uses = "may use"
        cure = f"set {_DECLARED} = 'element' in the class if its step treats each element alone; "
    raise ValueError(
        f"{kind.__name__} {uses} whole parameters, but each rank has a part of {held.name}; {cure}"
        f"{axis} = 1 works"
    )


def _unit(optimizer: optim.Optimizer) -> str | None:
    """Returns what an optimizer updates alone, one of `_UNITS`; None if it is not known."""
    if type(optimizer) in ELEMENTWISE:
        return "element"
    if type(optimizer) in _OF_PARAMETERS:
        return "parameter"
    found: object = getattr(optimizer, _DECLARED, None)
    if found is not None and found not in _UNITS:
        raise ValueError(
            f"{type(optimizer).__name__}.{_DECLARED}: expected 'element' or 'parameter', got "
            f"{found!r}"
        )
    return None if found is None else str(found)


def _check_closure(optimizer: optim.Optimizer) -> None:
    """Raises `ValueError` for an optimizer that computes several losses in a step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer: the step of {type(optimizer).__name__} needs a closure, which computes the"
            " loss again, but a run computes it once in a step; expected an optimizer whose step "
            "needs no closure, such as AdamW"
        )

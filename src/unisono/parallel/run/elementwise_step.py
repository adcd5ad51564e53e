"""Steps of optimizers that treat each element alone, on plain arrays instead of parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import optim
from torch.distributed.tensor import DTensor

from unisono.parallel.run.parameter_sets import ParameterSet, ShardedSet

_ELEMENTWISE = (
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
_OF_WHOLE_PARAMETERS = (optim.Adafactor, optim.Muon)


def merge_parameters(optimizer: optim.Optimizer, sets: Sequence[ParameterSet]) -> None:
    """Replaces an optimizer's parameters by plain arrays that hold the same elements.

    Each parameter costs an optimizer about 30 us for a step, and a DTensor 170 us, so that a step
    on few plain arrays is faster. Other optimizers, such as Muon and Adafactor, use the rows or the
    norm of a parameter, and keep the parameters. Raises `ValueError` for these with ZeRO-1, whose
    ranks have parts of parameters.
    """
    if type(optimizer) not in _ELEMENTWISE:
        _check_whole(optimizer, sets)
        if any(isinstance(each, ShardedSet) for each in sets):
            names = ", ".join(each.__name__ for each in _ELEMENTWISE)
            raise ValueError(
                f"zero = 1 divides parameters, so it needs one of torch's optimizers that treat "
                f"each element alone ({names}), got {type(optimizer).__name__}; zero = 2 works"
            )
        return
    groups = {
        parameter: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    for each in sets:
        former = set(each.trained)
        arrays = each.merge(groups)
        for number, group in enumerate(optimizer.param_groups):
            kept = [parameter for parameter in group["params"] if parameter not in former]
            group["params"] = kept + [array for array, place in arrays if place == number]
    if isinstance(optimizer, optim.Adagrad):  # it makes its states at once
        first = optimizer.defaults["initial_accumulator_value"]
        groups_of_arrays = [dict(group) for group in optimizer.param_groups]
        fresh = optim.Adagrad(groups_of_arrays, initial_accumulator_value=first)
        optimizer.state.clear()
        optimizer.state.update(fresh.state)


def _check_whole(optimizer: optim.Optimizer, sets: Sequence[ParameterSet]) -> None:
    """Raises `ValueError` for an optimizer of rows and norms, if a rank has a part of a matrix."""
    kind = type(optimizer)
    for held in (held for each in sets for held in each.held):
        # torch's Adafactor has no operations on split matrices (DTensor)
        is_split = kind is optim.Adafactor and isinstance(held.values, DTensor)
        is_cut = kind in _OF_WHOLE_PARAMETERS and tuple(held.values.shape) != held.block.shape
        if is_split or is_cut:
            raise ValueError(
                f"{kind.__name__} uses whole parameters, but each rank has a part of {held.name}; "
                f"{'zero = 0' if is_split else 'tp = 1'} works"
            )

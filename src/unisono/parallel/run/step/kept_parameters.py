"""The check that a program keeps the parameters that `parallelize` has divided."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from unisono.parallel.run.parameters.optimizers import Optimizers
from unisono.parallel.run.parameters.parameter_sets import HeldParameter, ParameterSet
from unisono.torch_backend import own_parameters, storage_number


class KeptParameters:
    """The parameters of a run, which its optimizer and modules must keep."""

    def __init__(
        self,
        stages: Sequence[tuple[int, nn.Module]],
        sets: Sequence[ParameterSet],
        frozen: Sequence[HeldParameter],
        optimizers: Optimizers,
    ) -> None:
        self._frozen = frozen
        held = [*frozen, *(held for each in sets for held in each.held)]
        names = {each.values: each.name for each in held}
        modules = [module for _, stage in stages for module in stage.modules()]
        self._slots = [
            (own_parameters(module), key, parameter, names[parameter])
            for module in dict.fromkeys(modules)
            for key, parameter in own_parameters(module).items()
            if parameter is not None
        ]
        """For each parameter of a module: where the module keeps it, and its name in the model."""
        split = [(each.name, each.values) for each in held if isinstance(each.values, DTensor)]
        self._split = [
            (name, values, values.shape, values.stride(), storage_number(values))
            for name, values in split
        ]
        """For each split parameter: its name, shape and strides, and the number of its storage."""
        self.note(optimizers)

    def note(self, optimizers: Optimizers) -> None:
        """Notes the arrays that the run has given to the optimizers."""
        self._arrays = _arrays(optimizers)

    def require(self, optimizers: Optimizers) -> None:
        """Raises `ValueError` if the program trains or uses other parameters than the run's."""
        found = _arrays(optimizers)
        if found != self._arrays:
            raise ValueError(
                f"optimizer: expected the {len(self._arrays)} arrays that parallelize gave it, got "
                f"{len(found)}, of which {len(found - self._arrays)} are others; gradients of "
                "parameters that are added later are not summed over the ranks, so pass all "
                "parameters to parallelize"
            )
        for each in self._frozen:
            if each.values.requires_grad:
                raise ValueError(
                    f"{each.name}: requires a gradient now, but did not when parallelize was "
                    "called; freeze parameters that a later step trains after parallelize"
                )
        for number, (name, split, shape, stride, storage) in enumerate(self._split):
            if storage_number(split) != storage:
                # torch keeps the values of a DTensor elsewhere, and would use these on
                split.data = DTensor.from_local(
                    split.to_local(),
                    split.device_mesh,
                    split.placements,
                    run_check=False,
                    shape=shape,
                    stride=stride,
                )
                self._split[number] = name, split, shape, stride, storage_number(split)
                raise ValueError(
                    f"{name}: the program assigned to its data, which a split parameter (DTensor) "
                    "ignores; change values in place, for example parameter.data.mul_(2) or "
                    "load_state_dict of torch.distributed.checkpoint; zero = 1 works"
                )
        for slots, key, parameter, name in self._slots:
            present = slots.get(key)
            if present is parameter:
                continue
            # between steps, a module may also have the parameter that `fully_shard` has gathered
            is_gathered = isinstance(parameter, DTensor) and not isinstance(present, DTensor)
            if not (is_gathered and present is not None):
                raise ValueError(
                    f"{name}: the model has another parameter than parallelize received, so "
                    "training would not change it; copy values with load_state_dict(assign=False) "
                    "or parameter.copy_"
                )


def _arrays(optimizers: Optimizers) -> set[int]:
    """Returns the ids of the optimizers' arrays, which the run keeps alive."""
    return {id(each) for group in optimizers.groups for each in group["params"]}

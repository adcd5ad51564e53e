"""The optimizers of a run's parameters on this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import optim

AVERAGE = "average"
"""The name of the state that is an array's average over steps."""


class Optimizers:
    """Optimizers of different parameters. Each step of the run is one step of each of them."""

    def __init__(self, each: Sequence[optim.Optimizer]) -> None:
        self.each = tuple(each)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in order."""
        return [group for each in self.each for group in each.param_groups]

    def step(self) -> None:
        """Updates the parameters that have a gradient."""
        for each in self.each:
            each.step()

    def owner(self, array: torch.Tensor) -> optim.Optimizer | None:
        """Returns the optimizer that updates an array; None if there is none."""
        for each in self.each:
            if any(array is own for group in each.param_groups for own in group["params"]):
                return each
        return None

    def states(self, array: torch.Tensor) -> Mapping[str, Any]:
        """Returns the states of an array by name; empty if it has none."""
        return next((each.state[array] for each in self.each if array in each.state), {})

    def forget(self, array: torch.Tensor) -> None:
        """Removes the states of an array."""
        for each in self.each:
            each.state.pop(array, None)

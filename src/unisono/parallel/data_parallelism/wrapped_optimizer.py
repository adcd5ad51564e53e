"""The base of objects in place of a torch optimizer."""

from __future__ import annotations

from typing import Any

import torch


class WrappedOptimizer:
    """Wraps a torch optimizer, `optimizer`, whose attributes it has, too."""

    optimizer: torch.optim.Optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def step(self, closure: Any = None) -> Any:
        """Takes a step of the optimizer."""
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients."""
        self.optimizer.zero_grad(set_to_none)

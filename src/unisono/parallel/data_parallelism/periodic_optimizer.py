"""The base of optimizers whose ranks train alone and synchronize every few steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Unpack

import torch
from torch import nn

from unisono.controller import Controller
from unisono.parallel.data_parallelism.gradient_exchange import GradientExchange, average_all
from unisono.parallel.rank_context import ContextOptions, RankContext


class PeriodicOptimizer(ABC):
    """Wraps a torch optimizer, and calls `synchronize` after every `every` steps.

    Attributes that are not listed here are those of the wrapped optimizer. Its state stays on its
    rank. All ranks must take the same number of steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        name: str = "",
        **options: Unpack[ContextOptions],
    ) -> None:
        if every < 1:
            raise ValueError(f"every: expected 1 or more steps, got {every}")
        self.optimizer = optimizer
        self.every = every
        self.steps = 0
        """Number of steps taken."""
        self._prefix = f"{name}." if name else ""
        self._parameters = {
            name: each for name, each in model.named_parameters() if each.requires_grad
        }
        self._buffers = dict(model.named_buffers())
        self._context = RankContext(
            options.get("comm"),
            options.get("controller"),
            options.get("fusion_bytes"),
            options.get("reproducible", False),
            options.get("tune_fusion"),
        )
        self._context.broadcast([*model.parameters(), *self._buffers.values()])
        self._dense = GradientExchange(self._context.controller, self._prefix)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    @abstractmethod
    def synchronize(self) -> None:
        """Makes the model equal on all ranks. Collective."""

    def step(self, closure: Any = None) -> Any:
        """Takes a step of the optimizer, and calls `synchronize` if it is due.

        Raises the errors of the controller, for example `PeerLostError`.
        """
        result = self.optimizer.step(closure)
        self.steps += 1
        if self._is_due():
            self.synchronize()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients."""
        self.optimizer.zero_grad(set_to_none)

    @property
    def controller(self) -> Controller:
        """The controller that exchanges the parameters."""
        return self._context.controller

    def close(self) -> None:
        """Closes the controller and communicator made for this object. Does not synchronize."""
        self._context.close()

    def _is_due(self) -> bool:
        return self.steps % self.every == 0

    def _average_buffers(self) -> None:
        """Averages float buffers, such as running means; copies all others from rank 0."""
        floats = {
            name: each.detach() for name, each in self._buffers.items() if each.is_floating_point()
        }
        average_all(self._dense, floats)
        broadcast = self._context.controller.broadcast
        others = {name: each for name, each in self._buffers.items() if name not in floats}
        handles = [broadcast(self._prefix + name, each) for name, each in others.items()]
        for handle in handles:
            handle.wait()

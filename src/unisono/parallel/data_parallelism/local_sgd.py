"""Ranks that train alone, and every few steps make their models equal.

With local SGD they average their parameters; `diloco.py` takes the step of an outer optimizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Unpack

import torch
from torch import nn

from unisono.controller import Controller
from unisono.parallel.data_parallelism.gradient_exchange import GradientExchange, average_all
from unisono.parallel.data_parallelism.wrapped_optimizer import WrappedOptimizer
from unisono.parallel.rank_context import ContextOptions, RankContext


class PeriodicOptimizer(WrappedOptimizer, ABC):
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


class LocalSGD(PeriodicOptimizer):
    """Wraps a torch optimizer, and averages the parameters of all ranks every `every` steps.

    Each rank computes gradients of its own part of the batch and takes steps of its own, so the
    ranks exchange 1 / `every` of the bytes of data parallelism. Between two averages the ranks'
    parameters differ. With `every=1` and SGD, the result equals that of averaged gradients. Source:
    S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.

    Parameters and buffers start with the values of rank 0. Collective over all ranks.

    >>> import torch, unisono
    >>> model = torch.nn.Linear(2, 1)
    >>> with unisono.init(rank=0, size=1, rendezvous="example of local SGD") as comm:
    ...     sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     optimizer = LocalSGD(model, sgd, comm=comm, every=8)
    ...     for _ in range(16):  # averages twice
    ...         optimizer.zero_grad()
    ...         model(torch.ones(1, 2)).square().sum().backward()
    ...         optimizer.step()
    ...     optimizer.close()
    >>> optimizer.steps
    16
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        dense_steps: int = 0,
        name: str = "",
        **options: Unpack[ContextOptions],
    ) -> None:
        """`dense_steps`: number of initial steps after each of which the ranks average.

        `options`: `comm`, `controller`, `fusion_bytes` and `reproducible`; see `data_parallel` for
        these and for `name`. Raises `ValueError` for wrong arguments.
        """
        if dense_steps < 0:
            raise ValueError(f"dense_steps: expected 0 or more steps, got {dense_steps}")
        super().__init__(model, optimizer, every=every, name=name, **options)
        self.dense_steps = dense_steps

    @torch.no_grad()
    def synchronize(self) -> None:
        """Averages the parameters and buffers over all ranks, in place. Collective."""
        average_all(self._dense, {name: each.detach() for name, each in self._parameters.items()})
        self._average_buffers()

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state and the number of steps.

        Between two averages, parameters and state differ between ranks: each rank saves its own.
        """
        return {"optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state that `state_dict` returned on this rank."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.steps = state_dict["steps"]

    def _is_due(self) -> bool:
        local_steps = self.steps - self.dense_steps
        return local_steps <= 0 or local_steps % self.every == 0

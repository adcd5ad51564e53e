"""An optimizer that averages its model's gradients over all ranks, as in Horovod."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unisono.communicator import Communicator
from unisono.controller import Controller
from unisono.parallel.gradient_reducer import GradientReducer
from unisono.parallel.rank_context import RankContext


class DistributedOptimizer:
    """Wraps a torch optimizer; everything that is not listed here is the optimizer's own.

    The gradients of `model` are averaged when `backward()` returns, so `step` is the optimizer's
    own, and clipping before it works. The model is used as it is. Parameters and buffers start with
    the values of rank 0. Collective over all ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        comm: Communicator | None = None,
        controller: Controller | None = None,
        fusion_bytes: int | None = None,
    ) -> None:
        """`comm`, `controller` and `fusion_bytes`: see `data_parallel`."""
        self.optimizer = optimizer
        self._context = RankContext(comm, controller, fusion_bytes)
        self._context.broadcast([*model.parameters(), *model.buffers()])
        parameters = dict(model.named_parameters())
        self._reducer = GradientReducer(parameters, self._context.controller)
        self._hook = model.register_forward_pre_hook(self._prepare)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def step(self, closure: Any = None) -> Any:
        """Takes a step of the optimizer."""
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients."""
        self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the next one outside averages the sum."""
        with self._reducer.no_sync():
            yield

    def close(self) -> None:
        """Removes the hooks, and closes what this object made."""
        self._hook.remove()
        self._reducer.close()
        self._context.close()

    def _prepare(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._reducer.recover()
            self._reducer.watch()

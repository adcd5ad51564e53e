"""Local SGD: each rank trains alone; every few steps the ranks average their parameters."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import nn

from unisono.parallel.data_parallelism.gradient_exchange import average_all
from unisono.parallel.data_parallelism.periodic_optimizer import PeriodicOptimizer
from unisono.parallel.rank_context import ContextOptions


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

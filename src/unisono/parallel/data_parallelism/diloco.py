"""DiLoCo: an outer optimizer uses the ranks' average progress over many local steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import nn

from unisono.parallel.data_parallelism.compression_state import (
    STATE_KEY,
    Compression,
    CompressionState,
    make_exchange,
    require_compression,
)
from unisono.parallel.data_parallelism.gradient_exchange import average_all
from unisono.parallel.data_parallelism.local_sgd import PeriodicOptimizer
from unisono.parallel.rank_context import ContextOptions

OuterOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def nesterov_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the outer optimizer of the DiLoCo paper: SGD with Nesterov momentum.

    >>> nesterov_sgd([nn.Parameter(torch.zeros(1))]).defaults["momentum"]
    0.9
    """
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo(PeriodicOptimizer):
    """Wraps an inner torch optimizer; after every `every` steps an outer optimizer takes a step.

    All ranks start a period with the same parameters, and each takes `every` inner steps alone. The
    outer gradient is the start parameters minus the rank's current parameters, averaged over all
    ranks. The outer optimizer applies this gradient to the start parameters, and all ranks begin
    the next period with the result. Source: A. Douillard et al., "DiLoCo: Distributed
    Low-Communication Training of Language Models", 2023.

    Parameters and buffers start with the values of rank 0. Collective over all ranks.

    >>> import torch, unisono
    >>> model = torch.nn.Linear(2, 1)
    >>> with unisono.init(rank=0, size=1, rendezvous="example of DiLoCo") as comm:
    ...     inner = torch.optim.AdamW(model.parameters())
    ...     optimizer = DiLoCo(model, inner, comm=comm, every=4)
    ...     for _ in range(8):  # two outer steps
    ...         optimizer.zero_grad()
    ...         model(torch.ones(1, 2)).square().sum().backward()
    ...         optimizer.step()
    ...     optimizer.close()
    >>> optimizer.steps
    8
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        outer: OuterOptimizer = nesterov_sgd,
        every: int,
        compression: Compression | None = None,
        name: str = "",
        **options: Unpack[ContextOptions],
    ) -> None:
        """`outer`: function from a list of parameters, in the model's order, to an optimizer.

        `compression` applies to the outer gradients. `options`: `comm`, `controller`,
        `fusion_bytes` and `reproducible`; see `data_parallel` for these and for `name`. Raises
        `ValueError` and `TypeError` for wrong arguments.
        """
        require_compression(compression)
        super().__init__(model, optimizer, every=every, name=name, **options)
        self._start = {
            name: nn.Parameter(each.detach().clone()) for name, each in self._parameters.items()
        }
        self.outer_optimizer = outer(list(self._start.values()))
        """The optimizer that takes a step at each synchronization."""
        ours = self._context.controller
        self._exchange = make_exchange(compression, ours, self._prefix)
        self._compression = CompressionState(self._exchange, compression, ours, self._parameters)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Takes an outer step, and copies its result to the model on all ranks. Collective."""
        outer_gradients = {name: self._start[name] - now for name, now in self._parameters.items()}
        for name, average in average_all(self._exchange, outer_gradients).items():
            self._start[name].grad = average
        self.outer_optimizer.step()
        self.outer_optimizer.zero_grad()
        for name, now in self._parameters.items():
            now.copy_(self._start[name])
        self._average_buffers()

    def state_dict(self) -> dict[str, Any]:
        """Returns both optimizers' states, the last outer step's parameters and the step count.

        Between two outer steps, parameters and state differ between ranks: each rank saves its own.
        """
        state = {
            "optimizer": self.optimizer.state_dict(),
            "outer_optimizer": self.outer_optimizer.state_dict(),
            "start": {name: each.detach().clone() for name, each in self._start.items()},
            "steps": self.steps,
        }
        return {**state, STATE_KEY: self._compression.save()} if self._compression.exists else state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state that `state_dict` returned on this rank.

        Raises `ValueError` if the state does not fit.
        """
        if state_dict["start"].keys() != self._start.keys():
            differ = sorted(state_dict["start"].keys() ^ self._start.keys())
            raise ValueError(
                f"DiLoCo state: expected the parameters of this model; {', '.join(differ[:5])} "
                "are in one of the two only"
            )
        if self._compression.exists:
            self._compression.load(state_dict[STATE_KEY])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.outer_optimizer.load_state_dict(state_dict["outer_optimizer"])
        for name, value in state_dict["start"].items():
            self._start[name].copy_(value)
        self.steps = state_dict["steps"]

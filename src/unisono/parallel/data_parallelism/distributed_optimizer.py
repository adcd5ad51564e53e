"""An optimizer that averages its model's gradients over all ranks, as in Horovod."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unisono.communicator import Communicator
from unisono.controller import Controller
from unisono.parallel.data_parallelism.compression_state import (
    STATE_KEY,
    Compression,
    require_compression,
)
from unisono.parallel.data_parallelism.data_parallel_model import DataParallel
from unisono.parallel.data_parallelism.wrapped_optimizer import WrappedOptimizer
from unisono.parallel.rank_context import RankContext


class DistributedOptimizer(WrappedOptimizer):
    """Wraps a torch optimizer, and averages the gradients of its model over all ranks.

    The gradients of `model` are averaged when `backward()` returns, so `step` only calls the
    optimizer, and gradients can be clipped before `step`. Attributes that are not listed here are
    those of the wrapped optimizer. The model is not wrapped. Parameters and buffers start with the
    values of rank 0. Collective over all ranks.

    >>> import torch, unisono
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> with unisono.init(rank=0, size=1, rendezvous="example of an optimizer") as comm:
    ...     sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    ...     optimizer = DistributedOptimizer(sgd, model, comm=comm)
    ...     before = model.weight.detach().clone()
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    ...     optimizer.close()
    >>> torch.allclose(before - model.weight, torch.ones(1, 2))
    True
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        comm: Communicator | None = None,
        controller: Controller | None = None,
        fusion_bytes: int | None = None,
        tune_fusion: bool | None = None,
        compression: Compression | None = None,
        reproducible: bool = False,
    ) -> None:
        """See `data_parallel` for the arguments."""
        require_compression(compression)
        self.optimizer = optimizer
        self._parallel = DataParallel(
            model,
            RankContext(comm, controller, fusion_bytes, reproducible, tune_fusion),
            broadcast_buffers=False,
            compression=compression,
        )
        self._hooks = (
            model.register_forward_pre_hook(lambda *_: self._parallel.begin_forward()),
            model.register_forward_hook(lambda *given: self._parallel.end_forward(given[-1])),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state, and this rank's compression errors if there are any."""
        state, compressed = self.optimizer.state_dict(), self._parallel.compression_state
        return {**state, STATE_KEY: compressed.save()} if compressed.exists else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state that `state_dict` returned on this rank.

        If the state has no compression errors, such as a state of the wrapped optimizer, this rank
        keeps its current errors. Raises `ValueError` if the state does not fit.
        """
        state_dict = dict(state_dict)
        saved = state_dict.pop(STATE_KEY, None)
        if saved is not None:
            self._parallel.compression_state.load(saved)
        self.optimizer.load_state_dict(state_dict)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients inside the `with` block, without averaging them.

        The next backward pass after the block averages the accumulated gradients.
        """
        with self._parallel.no_sync():
            yield

    def close(self) -> None:
        """Removes the hooks, and closes the controller and communicator made for this object."""
        for hook in self._hooks:
            hook.remove()
        self._parallel.close()

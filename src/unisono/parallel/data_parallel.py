"""Data parallelism: every rank has the whole model and its own part of the batch."""

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


class DataParallel(nn.Module):
    """A model whose gradients are averaged over all ranks when `backward()` returns.

    `module` is the model itself. Forward calls pass through. Parameters and buffers start with the
    values of rank 0; with `broadcast_buffers`, training forwards copy rank 0's buffers to all ranks
    first.
    """

    def __init__(
        self,
        module: nn.Module,
        context: RankContext,
        *,
        broadcast_buffers: bool = True,
        name: str = "",
    ) -> None:
        super().__init__()
        self.module = module
        self._context = context
        self._broadcast_buffers = broadcast_buffers
        context.broadcast([*module.parameters(), *module.buffers()])
        self._reducer = GradientReducer(
            dict(module.named_parameters()),
            context.controller,
            prefix=f"{name}." if name else "",
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        self._prepare()
        return self.module(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _prepare(self) -> None:
        if not torch.is_grad_enabled():
            return
        self._reducer.recover()
        self._reducer.watch()
        if self._broadcast_buffers and self.training and self._reducer.enabled:
            self._context.broadcast(list(self.module.buffers()))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the next one outside averages the sum."""
        with self._reducer.no_sync():
            yield

    @property
    def controller(self) -> Controller:
        """The controller that averages the gradients."""
        return self._context.controller

    def close(self) -> None:
        """Removes the hooks, and closes what `data_parallel` made."""
        self._reducer.close()
        self._context.close()


def data_parallel(
    model: nn.Module,
    comm: Communicator | None = None,
    *,
    controller: Controller | None = None,
    broadcast_buffers: bool = True,
    fusion_bytes: int | None = None,
    name: str = "",
) -> DataParallel:
    """Returns `model` as a module whose gradients are averaged over all ranks.

    Gradients are submitted to a controller as backward yields them, so their exchange overlaps the
    rest of the backward pass. All are averaged when `backward()` returns: clipping, GradScaler and
    gradient inspection need no change. A parameter that no rank used keeps its `.grad`.

    `comm`: the ranks. None: those of torch.distributed's default group if it runs on `unisono`,
    else `unisono.init()`. `controller`: an own one instead, which `close` leaves open.
    `fusion_bytes`: see `Controller`. `name` begins the names of the tensors; models that share a
    controller need different ones. Collective over all ranks.

    >>> import torch, unisono
    >>> with unisono.init(rank=0, size=1, rendezvous="example of data_parallel") as comm:
    ...     model = data_parallel(torch.nn.Linear(2, 1), comm)
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     model.close()
    >>> model.module.weight.grad.tolist()
    [[1.0, 1.0]]
    """
    context = RankContext(comm, controller, fusion_bytes)
    return DataParallel(model, context, broadcast_buffers=broadcast_buffers, name=name)

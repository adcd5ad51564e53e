"""Data parallelism: every rank has the whole model and its own part of the batch."""

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
    CompressionState,
    make_exchange,
    require_compression,
)
from unisono.parallel.data_parallelism.gradient_reducer import GradientReducer
from unisono.parallel.rank_context import RankContext
from unisono.parallel.training_phases import TrainingPhases
from unisono.torch_backend import own_buffers


class DataParallel(nn.Module):
    """A model whose gradients are averaged over all ranks when `backward()` returns.

    The model submits each gradient to a controller as soon as it is computed. So the exchange
    overlaps the rest of the backward pass. Clipping, GradScaler and gradient inspection need no
    change. A parameter that no rank used keeps its `.grad`.

    `module` is the model itself; `forward` calls it. Parameters and buffers start with the values
    of rank 0. With `broadcast_buffers`, each forward pass in training mode first copies rank 0's
    buffers to all ranks.

    With a compression that keeps errors, `state_dict` has the errors under "compression", so
    checkpoints are complete without further calls. The errors differ between ranks: each rank saves
    and loads a checkpoint of its own. The `state_dict` of `module` is equal on all ranks, and has
    no errors.
    """

    def __init__(
        self,
        module: nn.Module,
        context: RankContext,
        *,
        broadcast_buffers: bool = True,
        compression: Compression | None = None,
        name: str = "",
    ) -> None:
        super().__init__()
        self.module = module
        self._context = context
        self._broadcast_buffers = broadcast_buffers
        context.broadcast([*module.parameters(), *module.buffers()])
        self._all_modules = list(module.modules())
        parameters, prefix = dict(module.named_parameters()), f"{name}." if name else ""
        exchange = make_exchange(compression, context.controller, prefix)
        self._reducer = GradientReducer(parameters, context.controller, exchange, prefix)
        self._phases = TrainingPhases(context.controller.timeline, module.parameters())
        self.compression_state = CompressionState(
            exchange, compression, context.controller, parameters
        )
        if self.compression_state.exists:
            register: Any = self.register_state_dict_post_hook
            register(_save_compression)
            register = self.register_load_state_dict_pre_hook
            register(_load_compression)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        self.begin_forward()
        output = self.module(*args, **kwargs)
        self.end_forward(output)
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin_forward(self) -> None:
        """Prepares for a forward pass of the model; `forward` does this."""
        if not torch.is_grad_enabled():
            return
        self._reducer.prepare()
        if self._broadcast_buffers and self.training and self._reducer.enabled:
            self._context.broadcast(self._buffers_now())
        self._phases.begin_forward()

    def end_forward(self, output: Any) -> None:
        """Notes the end of a forward pass of the model; `forward` does this."""
        self._phases.end_forward(output)

    def _buffers_now(self) -> list[torch.Tensor]:
        """Returns each current buffer of the model once. Uses the list of modules from the
        constructor, since a new search for modules would take longer than a step of a small model.
        """
        found = (each for module in self._all_modules for each in own_buffers(module).values())
        return list({id(each): each for each in found if each is not None}.values())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients inside the `with` block, without averaging them.

        The next backward pass after the block averages the accumulated gradients.
        """
        with self._reducer.no_sync():
            yield

    @property
    def controller(self) -> Controller:
        """The controller that averages the gradients."""
        return self._context.controller

    def close(self) -> None:
        """Removes the hooks, and closes the controller and communicator made for this model."""
        self._phases.close()
        self._reducer.close()
        self._context.close()


def data_parallel(
    model: nn.Module,
    comm: Communicator | None = None,
    *,
    controller: Controller | None = None,
    broadcast_buffers: bool = True,
    fusion_bytes: int | None = None,
    tune_fusion: bool | None = None,
    compression: Compression | None = None,
    reproducible: bool = False,
    name: str = "",
) -> DataParallel:
    """Returns `model` as a module whose gradients are averaged over all ranks.

    Collective over all ranks. Raises `ValueError` and `TypeError` for wrong arguments.

    `comm`: communicator of all ranks. None: the communicator of torch's default group if this group
    runs on `unisono`, else `unisono.init()`. `controller`: a controller of the caller, which
    `close` does not close. `fusion_bytes`, `tune_fusion`: see `Controller`. `name`: beginning of
    the tensors' names; models that share a controller need different names. `compression`:
    `Fp16()`, `Bf16()`, `PowerSGD()`, `Int8()` or `TopK()` sends fewer bytes, except of sparse
    gradients. `reproducible`: the bits of all averages do not depend on `fusion_bytes`, since each
    average is a sum in rank order, divided by the number of ranks; excludes `controller`.

    >>> import torch, unisono
    >>> with unisono.init(rank=0, size=1, rendezvous="example of data_parallel") as comm:
    ...     model = data_parallel(torch.nn.Linear(2, 1), comm)
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     model.close()
    >>> model.module.weight.grad.tolist()
    [[1.0, 1.0]]
    """
    require_compression(compression)
    return DataParallel(
        model,
        RankContext(comm, controller, fusion_bytes, reproducible, tune_fusion),
        broadcast_buffers=broadcast_buffers,
        compression=compression,
        name=name,
    )


def _save_compression(
    module: DataParallel, state_dict: dict[str, Any], prefix: str, _metadata: Any
) -> None:
    state_dict[prefix + STATE_KEY] = module.compression_state.save()


def _load_compression(
    module: DataParallel,
    state_dict: dict[str, Any],
    prefix: str,
    _metadata: Any,
    _strict: bool,
    missing_keys: list[str],
    *_: Any,
) -> None:
    saved = state_dict.pop(prefix + STATE_KEY, None)
    if saved is None:
        missing_keys.append(prefix + STATE_KEY)
    else:
        module.compression_state.load(saved)

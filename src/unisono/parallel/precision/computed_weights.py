"""Copies of weights in the type of computation, in place of the weights while passes run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from unisono.parallel.precision.precision import Precision
from unisono.torch_backend import own_buffers, own_parameters, use_present_weights, version_of

_Table = dict[str, Any]
_Slot = tuple[nn.Module, _Table, str, Any]
"""A module, one of its tables of tensors, and a name and a tensor in it."""


class ComputedWeights:
    """The weights of a rank's modules, which its passes use in the type of computation.

    A step makes one copy of each weight for all microbatches, and drops it after the passes. The
    gradient of a copy is converted and added to the gradient of the weight in each backward pass.
    Weights that `fully_shard` splits are not copied: torch converts them before it gathers them.
    """

    def __init__(self, modules: Iterable[nn.Module], precision: Precision) -> None:
        self._precision = precision
        self.are_changed = False
        """True if the last passes changed a copy in place: the weights do not have the change."""
        self._slots = [
            slot for slot in _slots(modules) if precision.computed(slot[-1].dtype) != slot[-1].dtype
        ]

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Surrounds the passes of a step, which use the copies."""
        copies = _put(self._slots, lambda each: each.to(self._precision.computed(each.dtype)))
        try:
            yield
        finally:
            self.are_changed = any(version_of(each) for each in copies.values())
            _restore(self._slots, copies)


@contextmanager
def traced_weights(model: nn.Module, precision: Precision) -> Iterator[dict[Any, torch.Tensor]]:
    """Surrounds the trace of a model, whose graph has the types of its passes.

    Tensors on the device meta are replaced by memory that nobody touches. Yields the tensors that
    the graph gets, each with that of the model.
    """
    buffers = [
        (module, own_buffers(module), key, each)
        for module in dict.fromkeys(model.modules())
        for key, each in own_buffers(module).items()
        if each is not None and each.is_meta
    ]
    slots = [
        slot
        for slot in _slots([model])
        if slot[-1].is_meta or precision.computed(slot[-1].dtype) != slot[-1].dtype
    ] + buffers

    def copied(each: torch.Tensor) -> torch.Tensor:
        if not isinstance(each, nn.Parameter):
            return torch.empty_like(each, device="cpu")
        dtype, values = precision.computed(each.dtype), each.detach()
        made = torch.empty_like(values, dtype=dtype, device="cpu") if each.is_meta else values
        return nn.Parameter(made.to(dtype), requires_grad=each.requires_grad)

    copies = _put(slots, copied)
    try:
        yield {copy: weight for weight, copy in copies.items()}
    finally:
        _restore(slots, copies)


def _slots(modules: Iterable[nn.Module]) -> list[_Slot]:
    """Returns the places of weights that are not split."""
    every = dict.fromkeys(each for module in modules for each in module.modules())
    return [
        (module, own_parameters(module), key, parameter)
        for module in every
        for key, parameter in own_parameters(module).items()
        if parameter is not None and not isinstance(parameter, DTensor)
    ]


def _put(
    slots: list[_Slot], copied: Callable[[Any], torch.Tensor]
) -> dict[torch.Tensor, torch.Tensor]:
    """Puts one copy of each tensor into all its places. Returns the copies."""
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for _, table, key, tensor in slots:
        if tensor not in copies:
            copies[tensor] = copied(tensor)
        table[key] = copies[tensor]
    _tell(slots)
    return copies


def _restore(slots: list[_Slot], copies: dict[torch.Tensor, torch.Tensor]) -> None:
    for _, table, key, tensor in slots:
        if table.get(key) is copies[tensor]:
            table[key] = tensor
    _tell(slots)


def _tell(slots: list[_Slot]) -> None:
    for module in dict.fromkeys(module for module, *_ in slots):
        use_present_weights(module)

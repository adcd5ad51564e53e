"""Tensors that say they are on an accelerator, where there is none: their memory is the CPU's.

What torch hands to the backend of that device is sent by this very backend, from and to the memory
behind these tensors. So it has to be Gloo, which knows CPUs. It is no CUDA device, for torch asks
those what they can.
"""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch.utils._pytree import tree_map

DEVICE = torch.device("xpu", 0)


class OnDevice(torch.Tensor):
    """A tensor on `DEVICE`, with `memory` behind it."""

    @staticmethod
    def __new__(cls, memory):
        return torch.Tensor._make_wrapper_subclass(
            cls, memory.size(), strides=memory.stride(), dtype=memory.dtype, device=DEVICE
        )

    def __init__(self, memory):
        self.memory = memory

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        def to_memory(value):
            if isinstance(value, cls):
                return value.memory
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                return _for_memory(dist.ProcessGroup.unbox(value)).boxed()
            return value

        def from_memory(value):
            return cls(value) if isinstance(value, torch.Tensor) else value

        result = operation(*tree_map(to_memory, args), **tree_map(to_memory, kwargs or {}))
        return tree_map(from_memory, result)


def on_device(*values):
    """A tensor on `DEVICE`."""
    return OnDevice(torch.tensor(values))


def zeros(length):
    """Zeros on `DEVICE`."""
    return OnDevice(torch.zeros(length))


def _for_memory(group):
    """The group, with the backend of `DEVICE` for CPU tensors."""
    twin = dist.ProcessGroup(dist.HashStore(), group.rank(), group.size())
    kind = dist.ProcessGroup.BackendType.GLOO
    twin._register_backend(torch.device("cpu"), kind, group._get_backend(DEVICE))
    return twin

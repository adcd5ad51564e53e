"""Simulated accelerator tensors on a machine without an accelerator; their memory is on the CPU.

The backend of the simulated device gets these tensors from torch, and sends their CPU memory. So
this backend must be Gloo, which supports CPUs. The device is not CUDA, since torch queries the
properties of CUDA devices.
"""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch.utils._pytree import tree_map

DEVICE = torch.device("xpu", 0)


class OnDevice(torch.Tensor):
    """A simulated tensor on `DEVICE`, whose data is in the CPU tensor `memory`."""

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
    """Returns a simulated tensor on `DEVICE` with these values."""
    return OnDevice(torch.tensor(values))


def zeros(length):
    """Returns a simulated tensor of zeros on `DEVICE`."""
    return OnDevice(torch.zeros(length))


def _for_memory(group):
    """Returns a copy of the group that uses the backend of `DEVICE` for CPU tensors."""
    twin = dist.ProcessGroup(dist.HashStore(), group.rank(), group.size())
    kind = dist.ProcessGroup.BackendType.GLOO
    twin._register_backend(torch.device("cpu"), kind, group._get_backend(DEVICE))
    return twin

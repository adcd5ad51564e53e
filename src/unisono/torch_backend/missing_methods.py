"""Refusals of the methods that torch's process groups and backends have and unisono lacks.

Each version of torch adds such methods. Inherited from torch, they would reach the group's
placeholder, which transfers no data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.errors import UnsupportedError
from unisono.torch_backend.private import (
    BACKEND_METHODS,
    GROUP_METHODS,
    ProcessGroupBase,
    hide_from_dynamo,
)


def refuse_missing_methods(cls: type) -> None:
    """Makes `cls`, a subclass of torch's process group, refuse the methods that it inherits from
    torch, except those that work for every group."""
    for name in dir(ProcessGroupBase):
        inherited = getattr(ProcessGroupBase, name)
        if not callable(inherited) or isinstance(inherited, type) or name.startswith("__"):
            continue
        if name not in GROUP_METHODS and getattr(cls, name) is inherited:
            setattr(cls, name, _refused(name, "process groups", "use the collectives of"))


class DeviceBackend:
    """Answers torch's questions about the backend of a device. Refuses to transfer data: that is
    done by the methods of the group.
    """

    def __init__(
        self, placeholder: Any, allocate: Callable[[int, torch.dtype], torch.Tensor]
    ) -> None:
        """`allocate` makes a tensor that the ranks of a host access in place, given its number of
        elements and its type.
        """
        self._placeholder = placeholder
        self._allocate = allocate

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Returns True for the CPU: FSDP2 may let the group allocate its tensors."""
        return device.type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns a tensor of `size` elements that the ranks of a host access in place."""
        if device.type != "cpu":
            raise UnsupportedError(f"allocate_tensor: expected the CPU, got {device}")
        return self._allocate(size, dtype)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._placeholder, name)
        if isinstance(found, bool):
            return False  # whatever the placeholder supports
        if not callable(found) or name in BACKEND_METHODS:
            return found
        return _refused(name, "backends", "call the method of the process group, or a function in")


def _refused(name: str, owner: str, cure: str) -> Callable[..., Any]:
    def method(*args: Any, **options: Any) -> Any:
        raise UnsupportedError(
            f"{name}: unisono's {owner} do not have this method of torch {torch.__version__}: "
            f"{cure} torch.distributed"
        )

    method.__name__ = name
    return method


hide_from_dynamo(DeviceBackend)

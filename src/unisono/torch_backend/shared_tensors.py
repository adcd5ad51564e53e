"""Tensors for the collectives of a process group, in the shared heap of a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from unisono.errors import UnsupportedError
from unisono.torch_backend.group_base import GroupBase
from unisono.torch_backend.heap_tensor import heap_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Returns an uninitialised CPU tensor for the collectives of `group` (None: torch's default
    group).

    If all tensors of a collective come from this function on all ranks, the ranks of a host read
    and write each other's tensors in place, so less is copied. See `Communicator.empty` for the
    rules. `dtype`: None means torch's default type.

    Raises `UnsupportedError` if unisono does not serve the group's CPU tensors.

    >>> dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
    >>> total = empty(2, 3, dtype=torch.float64).fill_(1)
    >>> dist.all_reduce(total)
    >>> total.sum().item()
    6.0
    >>> dist.destroy_process_group()
    """
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, GroupBase):
        raise UnsupportedError(
            f"empty: expected a group of the backend unisono, got {found!r}: call "
            'dist.init_process_group("unisono") first'
        )
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    return heap_tensor(found.communicator, torch.Size(shape), dtype or torch.get_default_dtype())  # type: ignore[arg-type]


def zeros_for(
    group: dist.ProcessGroup | None, count: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Returns zeros for the collectives of `group`, in the shared heap if the group has one. None
    means that they are for no collective.
    """
    if device.type == "cpu" and isinstance(group, GroupBase):
        return heap_tensor(group.communicator, (count,), dtype).zero_()
    return torch.zeros(count, dtype=dtype, device=device)

"""Sums of a few numbers over ranks, in each step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import distributed as dist

from unisono.torch_backend import communicator_of


def small_sum(numbers: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
    """Returns the sums of each rank's numbers over a group. Collective. Without a group, this rank
    is alone.

    Calls the communicator of a group of the backend unisono, since the calls that
    `torch.distributed` makes around it take longer than so small a sum.
    """
    shared = np.array(numbers, dtype=np.float64)
    communicator = communicator_of(group)
    if communicator is not None:
        communicator.all_reduce(shared)
    elif group is not None:
        dist.all_reduce(torch.from_numpy(shared), group=group)
    found: list[float] = shared.tolist()
    return found

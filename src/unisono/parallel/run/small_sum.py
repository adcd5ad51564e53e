"""Sums of a few numbers over ranks, in each step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import distributed as dist

from unisono.torch_backend import communicator_of


def small_sum(numbers: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
    """Returns the sums of each rank's numbers over a group of the backend unisono. Collective.

    Calls the group's communicator, since the calls that `torch.distributed` makes around it take
    longer than so small a sum.
    """
    shared = np.array(numbers, dtype=np.float64)
    communicator_of(group).all_reduce(shared)
    found: list[float] = shared.tolist()
    return found

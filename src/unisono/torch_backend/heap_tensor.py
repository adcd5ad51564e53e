"""Tensors in a rank's shared heap, which the other ranks of the host read and write in place."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unisono.communicator import Communicator


def heap_tensor(comm: Communicator, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns an uninitialised tensor in the shared heap of a communicator's rank."""
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    memory = comm.empty(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(*shape)

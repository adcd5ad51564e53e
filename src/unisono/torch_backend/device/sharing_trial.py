"""A trial of shared device memory, when a group is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from unisono.errors import UnsupportedError
from unisono.torch_backend.device.peer_device import (
    EXPORT_WORDS,
    Event,
    PeerDevice,
    Record,
    Wait,
)
from unisono.torch_backend.device.refusals import agree
from unisono.types import DType, ReduceOp

_WHAT = "CUDA tensors cannot be shared"
_FIRST = 1  # number of the trial's events; those of calls are larger


def require_sharing(comm: Any, device: PeerDevice, make: Callable[[], torch.Tensor]) -> None:
    """Connects a device, and reads a small tensor of each rank from each other rank. `make` returns
    a tensor of zeros on the device.

    Collective. Raises `UnsupportedError` with the reason on all ranks if a rank cannot share its
    memory or open that of another rank, so that all ranks choose another way together.
    """
    device.connect()
    words = np.zeros(2 + EXPORT_WORDS, np.int64)
    problem: Exception | None = None
    try:
        given = make()
        device.enqueue(lambda: given.fill_(comm.rank + 1))
        device.synchronize(device.mark())
        words[:2] = device.locate(given)
        words[2:] = device.export(int(words[0]))
    except (UnsupportedError, RuntimeError) as error:
        problem = error
    agree(comm, problem, _WHAT)
    rows = comm.all_gather(words).reshape(comm.size, -1)
    try:
        _read_all(comm, device, rows, make())
    except (UnsupportedError, RuntimeError) as error:
        problem = error
    agree(comm, problem, _WHAT)  # and the tensors live until all ranks have read them


def _read_all(comm: Any, device: PeerDevice, rows: Any, found: torch.Tensor) -> None:
    own, start = device.locate(found)
    device.open(comm.rank, own, device.export(own))
    target = device.address(comm.rank, own, start)
    for rank, words in enumerate(rows):
        allocation, offset = int(words[0]), int(words[1])
        device.open(rank, allocation, words[2:])
        source = device.address(rank, allocation, offset)
        device.prepare([target], [source], found.nbytes, DType.UINT8, ReduceOp.SUM, 1)()
        device.synchronize(device.mark())
        if not bool((found == rank + 1).all()):
            raise UnsupportedError(f"the memory of rank {rank} has other values than it should")
    records = [Record(Event.READY, 0), Record(Event.MOVED, 0)]
    device.batch(records, [Wait(comm.rank, Event.READY, 0)])(_FIRST)
    device.synchronize(device.mark())
    if not device.has_recorded(comm.rank, Event.MOVED, _FIRST):
        raise UnsupportedError("the device does not write flags in host memory")

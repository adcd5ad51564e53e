"""The shortest time that the bandwidth of a device's memory allows."""

from __future__ import annotations

from functools import partial

import torch

from unisono.bench.cases import Case
from unisono.bench.peers.base import Array, Call, Peer, Repeat
from unisono.bench.peers.cuda_devices import select_gpu
from unisono.errors import UnsupportedError


class DeviceMemoryPeer(Peer):
    """A driver like `MemoryPeer`, on a device: every rank multiplies or copies its N bytes, all
    ranks at the same time."""

    moves_data = False

    def __init__(self, *, rank: int, device: str) -> None:
        self.rank, self._device = rank, device
        if device == "cuda":
            select_gpu(rank)

    def bind(self, case: Case, x: Array, out: Array) -> Call:
        source = torch.ones(max(1, case.size_bytes // 4), device=self._device)
        if case.operation.reduces:
            return partial(source.mul_, 1.0)
        return partial(torch.empty_like(source).copy_, source)

    def exchange(self, case: Case, x: Array, out: Array) -> Repeat:
        raise UnsupportedError(f"the limit of {case.op} on a device is not measured")

    def finish(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

"""The physical limit: every rank passes once over its N bytes, all ranks at the same time."""

from __future__ import annotations

import numpy as np

from unisono.bench.cases import Case
from unisono.bench.peers.base import Array, Call, Peer


class MemoryPeer(Peer):
    """`x *= c` over N bytes for what reduces, a copy of N bytes for what moves."""

    moves_data = False

    def __init__(self, *, rank: int) -> None:
        self.rank = rank

    def bind(self, case: Case, x: Array, out: Array) -> Call:
        source = np.ones(max(1, case.size_bytes // 4), dtype=np.float32)
        if case.operation.reduces:
            factor = np.float32(1.0)
            return lambda: np.multiply(source, factor, out=source)
        target = np.ones_like(source)
        return lambda: np.copyto(target, source)

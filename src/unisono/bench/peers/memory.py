"""The shortest time that the memory's bandwidth allows. To measure it, every rank multiplies or
copies its N bytes once, all ranks at the same time."""

from __future__ import annotations

from functools import partial

import numpy as np

from unisono.bench.cases import Case
from unisono.bench.peers.base import Array, Call, Peer, Repeat

_PAGE_BYTES = 4096


class MemoryPeer(Peer):
    """A driver that performs `x *= c` on N bytes for reductions, else a copy of N bytes. For
    messages between pairs, one rank of each pair copies the messages."""

    moves_data = False

    def __init__(self, *, rank: int) -> None:
        self.rank = rank

    def bind(self, case: Case, x: Array, out: Array) -> Call:
        source = touched(max(1, case.size_bytes // 4))
        if case.operation.reduces:
            factor = np.float32(1.0)
            return lambda: np.multiply(source, factor, out=source)
        target = touched(source.size)
        return lambda: np.copyto(target, source)

    def exchange(self, case: Case, x: Array, out: Array) -> Repeat:
        if self.rank % 2 == 0:
            return lambda times: None
        count = max(1, case.size_bytes // 4)
        pairs = [(touched(count), touched(count)) for _ in range(case.outstanding)]
        return partial(_copy_all, pairs * (case.messages // case.outstanding))


def _copy_all(pairs: list[tuple[Array, Array]], times: int) -> None:
    for _ in range(times):
        for target, source in pairs:
            np.copyto(target, source)


def touched(count: int) -> Array:
    """Returns an array that begins at a page boundary. On some cores, copies are much slower if the
    source and the target begin at different offsets in a page."""
    whole = np.empty(count * 4 + _PAGE_BYTES, np.uint8)
    start = -whole.ctypes.data % _PAGE_BYTES
    found = whole[start : start + count * 4].view(np.float32)
    found.fill(1.0)
    return found

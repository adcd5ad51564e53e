"""The least time of an operation on one host: all ranks at once read every byte that the operation
must read, and write every byte that it must write, in their own memory.

The kernels are those of Unisono. There are no messages, no synchronisation and no staging.
"""

from __future__ import annotations

from functools import partial

from unisono import native
from unisono.bench.cases import Case
from unisono.bench.peers.base import Array, Call, Peer
from unisono.bench.peers.memory import touched
from unisono.errors import UnsupportedError

_COPIES = ("all_reduce", "all_gather", "all_to_all", "broadcast")


class KernelsPeer(Peer):
    """A driver that copies N bytes for all_reduce, all_gather and all_to_all, and for broadcast on
    all ranks but the root. For reduce_scatter, it sums n parts of N/n bytes.

    With `streaming`, stores bypass the caches. Elements are float32.
    """

    moves_data = False

    def __init__(self, *, rank: int, streaming: bool) -> None:
        self.rank = rank
        self._streaming = streaming
        self._input: Array = touched(0)
        self._target: Array = touched(0)

    def bind(self, case: Case, x: Array, out: Array) -> Call:
        count = max(1, case.size_bytes // 4)
        source = touched(count)
        self._input = source if case.operation.x_split else source[: count // case.pieces]
        if case.op == "broadcast" and self.rank == case.root:
            return lambda: None
        if case.op in _COPIES:
            target = self._target = touched(count)
            places = target.ctypes.data, source.ctypes.data
            return partial(native.copy_memory, *places, source.nbytes, self._streaming)
        if case.op == "reduce_scatter":
            target = self._target = touched(count // case.ranks)
            places = target.ctypes.data, source.ctypes.data
            return partial(native.sum_parts, *places, case.ranks, target.size, self._streaming)
        raise UnsupportedError(f"the limit of {case.op} is not defined")

    def rewrite(self, x: Array) -> None:
        self._input.fill(0)

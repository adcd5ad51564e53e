"""An all_reduce of several arrays as one message."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unisono import native
from unisono.communicator.arrays import Array, Staged, locate, stage
from unisono.communicator.call_cache import CallRequest, parse_reduction
from unisono.communicator.communicator import Communicator
from unisono.communicator.engine import Call
from unisono.types import Op


class FusedAllReduce:
    """An all_reduce of several arrays as one message, in place; made once, called many times.

    The arrays of all calls have the same types and lengths as `arrays`. A single array is reduced
    in place. Several arrays are copied into one buffer, and back at the end.
    """

    def __init__(self, comm: Communicator, arrays: Sequence[Array], op: str) -> None:
        """Raises `UnsupportedError` or `TypeError` for arrays that this operation cannot reduce."""
        staged = [stage(array, writable=True) for array in arrays]
        self.dtype, self.reduction = staged[0].dtype, parse_reduction(op)
        self.lengths = tuple(each.located[1] for each in staged)
        """Bytes of each array."""
        self._cache = comm._engine.call_cache
        self._empty = comm.empty
        self.prepared = self.prepare(self.lengths)
        """The call without its memory."""
        self._buffer: np.ndarray | None = None

    def prepare(self, lengths: tuple[int, ...]) -> native.Prepared:
        """Returns the call for arrays of these lengths in bytes, without its memory."""
        cache = self._cache
        request = CallRequest(
            Op.ALL_REDUCE, (sum(lengths),), self.dtype, self.reduction, packed=lengths
        )
        cache.check(request)
        if cache.widens(request):
            # The usual algorithm for the total length would round more than once. Use the algorithm
            # for the shortest array, which rounds each result once.
            small = cache.choose(request.op, min(lengths), dtype_bytes=2, narrow=True)
            request = request._replace(algorithm=small.plan.name)
        if len(lengths) == 1:
            request = request._replace(packed=())
        return cache.call(request)

    def call(self, arrays: Sequence[Array]) -> Call:
        """Returns the call that reduces these arrays. The previous call must have ended."""
        pack = native.Pack()
        copied: list[Staged] = []
        for array in arrays:
            located = locate(array, True)
            if located is None:
                staged = stage(array, writable=True)
                copied.append(staged)
                located = staged.located
            pack.add(located[0], located[1], array)
        if len(arrays) == 1:
            where = pack.memory()
            restore = copied[0].restore if copied else None
            return Call(self.prepared, where, where, None, (pack, copied), complete=restore)
        if self._buffer is None:
            self._buffer = self._empty(sum(self.lengths), np.uint8)
        address = self._buffer.ctypes.data
        pack.gather(address)
        where = [(address, self._buffer.nbytes)]

        def complete() -> None:
            pack.scatter(address)
            for each in copied:
                each.restore()

        keep = (self, pack, copied)  # `self` must stay alive, since it owns the buffer
        return Call(self.prepared, where, where, None, keep, complete=complete)

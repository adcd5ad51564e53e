"""The memory that calls of a batch read and write, and the check that no call writes memory that
another call uses.

A result may go to an array whose elements are not adjacent, or that the call reduces in a wider
copy. So this module compares the caller's arrays, not the memory of the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.exceptions import TooHardError
from numpy.typing import NDArray

from unisono import native
from unisono.communicator.arrays import Array, locate
from unisono.communicator.collective_calls import receives
from unisono.communicator.engine import Call, MessageCall, arrays_of

Span: TypeAlias = tuple[int, int, bool, int]
"""Start and end address, True if the call writes this memory, and the number of the call."""

_IN_PLACE = frozenset({"all_reduce", "reduce", "broadcast", "scan", "exscan"})
_MOST_WORK = 10_000


class BatchMemory:
    """The memory of the calls of one batch. Numbers of calls are positive."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._apart: list[tuple[Array, bool, int]] = []
        """Arrays whose elements are not adjacent, whether they are written, and the numbers of
        their calls."""

    def add_call(self, number: int, call: Call, rank: int) -> None:
        """Adds a collective that runs alone."""
        if call.later is not None:
            for array in call.later.reads:
                self._use(number, array, is_written=False)
            for array in call.later.writes:
                self._use(number, array, is_written=True)
            return
        self._spans += [(at, at + nbytes, False, number) for at, nbytes in call.inputs]
        for array in _written(call, rank):
            self._use(number, array, is_written=True)

    def add_copied(self, number: int, array: Array) -> None:
        """Adds an array whose result comes from a copy that is packed with others."""
        self._use(number, array, is_written=True)

    def add_message(self, number: int, message: MessageCall) -> None:
        """Adds a send or a receive."""
        if message.sends:
            at, nbytes, _ = message.staged.located
            self._spans.append((at, at + nbytes, False, number))
        else:
            self._use(number, message.staged.array, is_written=True)

    def _use(self, number: int, array: Array, *, is_written: bool) -> None:
        located = locate(array, False)
        if located is None:
            self._apart.append((array, is_written, number))
        else:
            self._spans.append((located[0], located[0] + located[1], is_written, number))

    def is_shared(self, packs: Sequence[native.Pack]) -> bool:
        """Returns True if one call writes memory that another call uses."""
        if native.share_memory(packs, self._spans):
            return True
        if not self._apart:
            return False
        others = [
            (_bytes_at(start, end), written, call) for start, end, written, call in self._spans
        ]
        others += [
            (_bytes_at(at, at + size), True, 0) for pack in packs for at, size in pack.memory()
        ]
        apart = [(_elements(array), written, call) for array, written, call in self._apart]
        return any(
            call != other and (written or other_written) and _overlap(memory, other_memory)
            for place, (memory, written, call) in enumerate(apart)
            for other_memory, other_written, other in [*others, *apart[place + 1 :]]
        )


def _written(call: Call, rank: int) -> Sequence[Array]:
    """Returns the caller's arrays that this rank's call writes."""
    request, result = call.request, call.result
    if request is None:
        return ()
    if request.op in _IN_PLACE and not receives(request.op, rank, request.root):
        return ()
    return arrays_of(result)


class _Memory:
    """Memory as an object that NumPy can view."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: Any, unit: int) -> None:
        self.__array_interface__ = {
            "data": (address, True),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{unit}",
            "version": 3,
        }


def _bytes_at(start: int, end: int) -> NDArray[Any]:
    return np.asarray(_Memory(start, (end - start,), (1,), 1))


def _elements(array: Array) -> NDArray[Any]:
    """Returns the memory of an array's elements, of any type and strides."""
    if isinstance(array, np.ndarray):
        return array
    unit = array.element_size()
    strides = tuple(each * unit for each in array.stride())
    return np.asarray(_Memory(array.data_ptr(), tuple(array.shape), strides, unit))


def _overlap(a: NDArray[Any], b: NDArray[Any]) -> bool:
    if a.size == 0 or b.size == 0:
        return False
    try:
        # NumPy's stubs know only two of the values.
        return bool(np.shares_memory(a, b, max_work=_MOST_WORK))  # type: ignore[arg-type]
    except TooHardError:  # the bounds overlap
        return True

"""Arrays in the shared heap of a rank, which the other ranks of the host read in place.

The functions are methods of `Communicator`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from unisono.communicator.communicator import Communicator

Shape: TypeAlias = int | Sequence[int]


def empty(self: Communicator, shape: Shape, dtype: DTypeLike = np.float64) -> NDArray[Any]:
    """Returns an uninitialised array in this rank's shared heap.

    A call whose arrays come from `empty` on all ranks copies less: the ranks read each other's
    arrays in place. Results have the same bits as with other arrays. If only some ranks pass such
    arrays to a call, all raise `MismatchError`. Slices and views count as such arrays.

    On several hosts, the ranks of one host read each other's arrays in place.

    Memory is freed with the last view. It outlives the communicator. A forked child shares the
    memory with its parent. Where the group has no shared heap (in a sandbox without memfd), this
    function returns an ordinary array.

    Raises `MemoryError` if the heap has no room, and `AbortedError` after `close` and in a forked
    child.

    >>> import numpy as np, unisono
    >>> with unisono.init(rank=0, size=1, rendezvous="example of empty") as comm:
    ...     x = comm.empty((4, 4), np.float32)
    ...     x[...] = 1
    ...     print(comm.all_reduce(x).sum(), comm.shared_bytes)
    16.0 64
    """
    dimensions = _dimensions(shape)
    element = np.dtype(dtype)
    count = math.prod(dimensions)
    if element.hasobject:
        raise TypeError(f"empty: expected elements of a fixed size, got {element}")
    group = self._engine.group
    if group.heap_bytes == 0 or count * element.itemsize == 0:
        return np.empty(dimensions, element)
    nbytes = count * element.itemsize
    if nbytes > group.heap_bytes:
        raise MemoryError(f"no room for a shared array of {nbytes} bytes")
    memory = group.allocate(nbytes)
    return memory.view(element).reshape(dimensions)


def empty_like(self: Communicator, array: Any) -> NDArray[Any]:
    """Returns an uninitialised array with the shape and type of `array` in this rank's shared heap;
    see `empty`, also for the errors.

    >>> import numpy as np, unisono
    >>> with unisono.init(rank=0, size=1, rendezvous="example of empty_like") as comm:
    ...     x = comm.empty_like(np.ones(3))
    ...     x[...] = 2
    ...     print(comm.all_reduce(x).sum())
    6.0
    """
    return empty(self, array.shape, array.dtype)


def _dimensions(shape: Shape) -> tuple[int, ...]:
    found = (
        tuple(map(operator.index, shape))
        if isinstance(shape, Sequence)
        else (operator.index(shape),)
    )
    if any(each < 0 for each in found):
        raise ValueError(f"empty: expected dimensions of at least 0, got {found}")
    return found

"""The memory of NumPy arrays and torch tensors as bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = Any
"""A NumPy array, or a torch tensor in CPU memory."""
Bytes = NDArray[np.uint8]


class ArrayBytes(NamedTuple):
    """The bytes of an array in row-major order."""

    content: Bytes
    write_back: Callable[[], None] | None
    """Copies the bytes to the array's elements, if `content` is a copy; None for the memory of the
    array itself."""


def array_bytes(name: str, array: Array) -> ArrayBytes:
    """Returns the bytes of an array. Raises `TypeError` for anything else than an array in CPU
    memory.

    >>> array_bytes("x", np.ones(2, np.int16)).content.tolist()
    [1, 0, 1, 0]
    """
    if isinstance(array, np.ndarray):
        return _of_numpy(name, array)
    if not (hasattr(array, "detach") and hasattr(array, "untyped_storage")):
        raise TypeError(
            f"{name}: expected a NumPy array or a torch tensor, not {type(array).__name__}"
        )
    return _of_tensor(name, array)


def _of_numpy(name: str, array: NDArray[Any]) -> ArrayBytes:
    if array.dtype.hasobject:
        raise TypeError(f"{name}: expected numbers, not Python objects")
    if array.flags.c_contiguous:
        return ArrayBytes(array.reshape(-1).view(np.uint8), None)
    packed = np.ascontiguousarray(array)
    return ArrayBytes(packed.reshape(-1).view(np.uint8), lambda: np.copyto(array, packed))


def _of_tensor(name: str, tensor: Array) -> ArrayBytes:
    import torch

    if type(tensor.detach()) is not torch.Tensor or tensor.layout != torch.strided:
        raise TypeError(
            f"{name}: expected a dense tensor of one process, not {type(tensor).__name__}; for a "
            "DTensor, pass its full_tensor()"
        )
    if tensor.device.type != "cpu":
        raise TypeError(
            f"{name}: expected a tensor in CPU memory, not on {tensor.device}; pass .cpu()"
        )
    own = tensor.detach()
    packed = own.resolve_conj().resolve_neg().contiguous()
    content: Bytes = packed.view(-1).view(torch.uint8).numpy()
    if packed.data_ptr() == own.data_ptr():
        return ArrayBytes(content, None)

    def write_back() -> None:
        own.copy_(packed)

    return ArrayBytes(content, write_back)

"""Where an array's elements lie: NumPy arrays and CPU torch tensors, of any strides.

What is an array, and which memory serves as it is, C++ says, here as in the calls that are known.
Torch is never imported here: a tensor is used by its methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from unisono import native
from unisono.errors import UnsupportedError
from unisono.types import DType

Array: TypeAlias = Any
"""A NumPy array, not a masked one, or a CPU torch tensor."""

Located: TypeAlias = tuple[int, int, int]
"""Address, bytes, type (a `DType` value) of contiguous elements."""

_ARRAYS = native.Arrays()

locate = _ARRAYS.locate
"""`locate(array, writable)`: where its elements lie; None for an array that must be staged."""


@dataclass(frozen=True, slots=True)
class Staged:
    """An array as contiguous memory: itself, or a copy whose content `restore` brings back."""

    located: Located
    array: Array
    copy: Array | None = None

    @property
    def dtype(self) -> DType:
        """The element type."""
        return DType(self.located[2])

    @property
    def count(self) -> int:
        """The number of elements."""
        return self.located[1] // self.dtype.size_bytes

    def restore(self) -> None:
        """Brings the result back where the caller expects it."""
        if self.copy is None:
            return
        if isinstance(self.array, np.ndarray):
            self.array[...] = self.copy
        else:
            self.array.copy_(self.copy)


def stage(array: Array, *, writable: bool) -> Staged:
    """The array as contiguous memory, copied if need be. Raises `TypeError`, `UnsupportedError`,
    or `ValueError` for what can be neither read nor written."""
    located = _ARRAYS.locate(array, writable)
    if located is not None:
        return Staged(located, array)
    dtype_of(array)  # raises for what no copy helps
    if isinstance(array, np.ndarray):
        return _stage_numpy(array, writable=writable)
    return _stage_tensor(array, writable=writable)


def dtype_of(array: Array, what: str = "") -> DType:
    """The element type. Raises `TypeError` for what is no array, with a text that begins with
    `what`, or `UnsupportedError`.

    >>> import numpy as np
    >>> dtype_of(np.zeros(2, np.float16)).name
    'FLOAT16'
    """
    found = _ARRAYS.dtype_of(array)
    if found is not None:
        return DType(found)
    if not _ARRAYS.takes(array):
        raise _not_an_array(array, what)
    name = str(array.dtype).removeprefix("torch.")
    raise UnsupportedError(f"elements of type {name} cannot be communicated")


def _not_an_array(found: object, what: str = "") -> TypeError:
    """What to raise for something else; `what` begins the text."""
    kind = type(found).__name__
    text = f"{what}expected a NumPy array or a CPU torch tensor, not {kind}"
    if isinstance(found, np.ma.MaskedArray):
        text += ", whose mask would stay behind: give its .data or its .filled()"
    return TypeError(text)


def _stage_numpy(array: Array, *, writable: bool) -> Staged:
    if writable and not array.flags.writeable:
        raise ValueError("the array is read-only, but the result belongs there")
    if writable:
        _require_apart(array.shape, array.strides, array.itemsize, "array", ".copy()")
    plain = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    copy = np.ascontiguousarray(plain)
    located = _ARRAYS.locate(copy, False)
    assert located is not None  # of a type that dtype_of knows
    return Staged(located, array, copy)


def _require_apart(
    shape: Sequence[int], strides: Sequence[int], unit: int, kind: str, cure: str
) -> None:
    """Raises `ValueError` if elements may share memory: then it cannot hold a result. `unit` is
    the stride from one element to the next."""
    if 0 in shape:
        return
    reach = unit
    for stride, length in sorted(zip(map(abs, strides), shape, strict=True)):
        if length > 1:
            if stride < reach:
                raise ValueError(
                    f"elements of the {kind} share memory, as after an expansion (shape "
                    f"{tuple(shape)}, strides {tuple(strides)}), so it cannot take a result: give "
                    f"its {cure} instead"
                )
            reach += stride * (length - 1)


def _stage_tensor(tensor: Array, *, writable: bool) -> Staged:
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"the tensor is on {tensor.device}; only CPU tensors are served (init_process_group("
            f"'cpu:unisono,{tensor.device.type}:...') names a backend for the others)"
        )
    if str(tensor.layout) != "torch.strided":
        raise UnsupportedError(
            f"the tensor's layout is {tensor.layout}; only strided ones are served"
        )
    if writable:
        _require_apart(tensor.shape, tensor.stride(), 1, "tensor", ".contiguous()")
    copy = tensor.detach().resolve_conj().resolve_neg().contiguous()
    located = _ARRAYS.locate(copy, True)
    if located is None:
        raise UnsupportedError(f"the memory of {type(tensor).__name__} cannot be reached")
    return Staged(located, tensor.detach(), copy)


def stage_pieces(arrays: Sequence[Array], ranks: int, *, writable: bool, what: str) -> list[Staged]:
    """One array per rank, all of one type."""
    if len(arrays) != ranks:
        raise ValueError(f"{what} must have one array per rank: {ranks}, not {len(arrays)}")
    pieces = [stage(array, writable=writable) for array in arrays]
    if len({piece.located[2] for piece in pieces}) > 1:
        raise ValueError(f"the arrays of {what} have different types")
    return pieces


def empty(like: Array, shape: tuple[int, ...]) -> Array:
    """An uninitialised array of the same kind and type."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, like.dtype)
    return like.new_empty(shape)


def widened(array: Array, factor: float | None = None) -> Array:
    """A contiguous float32 copy of 16- or 8-bit floats, whatever the strides; each times `factor`,
    a float32, if there is one."""
    source = stage(array, writable=False)
    shape = tuple(array.shape)
    if isinstance(array, np.ndarray):
        wide = np.empty(shape, np.float32)
    else:
        float32 = array.new_empty(()).float().dtype  # of one element: torch converts with threads
        wide = array.detach().new_empty(shape, dtype=float32)
    address = stage(wide, writable=True).located[0]
    native.widen(source.dtype, address, source.located[0], source.count, factor)
    return wide


def assign(target: Array, value: Array) -> None:
    """Converts `value` into `target`, with the roundings of the kernels."""
    places = stage(target, writable=True)
    if places.dtype.is_narrow_float and str(value.dtype).endswith("float32"):
        values = stage(value, writable=False)
        native.narrow(places.dtype, places.located[0], values.located[0], places.count)
        places.restore()
    elif isinstance(target, np.ndarray):
        target[...] = value
    else:
        target.detach().copy_(value)


def duplicate(array: Array) -> Array:
    """A copy with memory of its own."""
    return array.copy() if isinstance(array, np.ndarray) else array.detach().clone()


def overlap(a: Located, b: Located) -> bool:
    """Whether two memories share bytes."""
    return a[0] < b[0] + b[1] and b[0] < a[0] + a[1]

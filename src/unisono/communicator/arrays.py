"""Memory of arrays: NumPy arrays and CPU torch tensors, of any strides.

C++ decides which objects are arrays and which need a copy. The fast path uses the same code. This
module never imports torch; it only calls the methods of a tensor.
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
"""A NumPy array (not a masked one) or a CPU torch tensor."""

Located: TypeAlias = tuple[int, int, int]
"""Address, length in bytes and type (a `DType` value) of contiguous elements."""

_ARRAYS = native.Arrays()

locate = _ARRAYS.locate
"""`locate(array, writable)` returns the `Located` of an array, or None if `stage` must copy it."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Contiguous memory of an array: the array's own memory, or a copy."""

    located: Located
    array: Array
    copy: Array | None = None
    storage: object = None
    """The storage of a tensor, which keeps its memory even after `set_`."""

    @property
    def dtype(self) -> DType:
        """The element type."""
        return DType(self.located[2])

    @property
    def count(self) -> int:
        """The number of elements."""
        return self.located[1] // self.dtype.size_bytes

    def restore(self) -> None:
        """Copies the result from `copy` to the caller's array, if there is a copy."""
        if self.copy is None:
            return
        if isinstance(self.array, np.ndarray):
            self.array[...] = self.copy
        else:
            self.array.copy_(self.copy)


def stage(array: Array, *, writable: bool) -> Staged:
    """Returns the array as contiguous memory; copies it if its elements are not contiguous.

    Raises `TypeError`, `UnsupportedError`, or `ValueError` if the memory cannot be read or written.
    """
    located = _ARRAYS.locate(array, writable)
    if located is not None:
        return Staged(located, array, storage=_ARRAYS.storage_of(array))
    dtype_of(array)  # raises unless `array` is an array of a supported type
    if isinstance(array, np.ndarray):
        return _stage_numpy(array, writable=writable)
    return _stage_tensor(array, writable=writable)


def dtype_of(array: Array, what: str = "") -> DType:
    """Returns the element type of an array. Raises `UnsupportedError` for an unsupported type.

    Raises `TypeError` unless `array` is an array; the error text begins with `what`.

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
    raise UnsupportedError(f"{what}elements of type {name} are not supported")


def check_writable(array: Array, what: str = "") -> None:
    """Raises unless a call can write its result to `array`. Copies nothing.

    Raises `ValueError` for a read-only array or elements that share memory, `TypeError` or
    `UnsupportedError` for what is not an array. The error text begins with `what`.

    >>> check_writable(np.broadcast_to(1.0, 3), "x: ")
    Traceback (most recent call last):
    ValueError: x: the array is read-only, but the call writes its result there: give a writable one
    """
    if _ARRAYS.locate(array, True) is None:
        dtype_of(array, what)  # raises unless `array` is an array of a supported type
        _require_writable(array, what)


def _require_writable(array: Array, what: str = "") -> None:
    if not isinstance(array, np.ndarray):
        _require_strided(array, what)
        steps = array.stride()
        _require_no_overlap(array.shape, steps, 1, f"{what}elements of the tensor", ".contiguous()")
        return
    if not array.flags.writeable:
        raise ValueError(
            f"{what}the array is read-only, but the call writes its result there: give a writable "
            "one"
        )
    steps, unit = array.strides, array.itemsize
    _require_no_overlap(array.shape, steps, unit, f"{what}elements of the array", ".copy()")


def _require_strided(tensor: Array, what: str = "") -> None:
    if str(tensor.layout) != "torch.strided":
        raise UnsupportedError(
            f"{what}expected a strided tensor, but the tensor's layout is {tensor.layout}"
        )


def _not_an_array(found: object, what: str = "") -> TypeError:
    """Returns the error for an object that is not an array; the error's text begins with `what`."""
    kind = type(found).__name__
    text = f"{what}expected a NumPy array or a CPU torch tensor, not {kind}"
    if isinstance(found, np.ma.MaskedArray):
        text += ", whose mask would be lost: give its .data or its .filled()"
    return TypeError(text)


def _stage_numpy(array: Array, *, writable: bool) -> Staged:
    if writable:
        _require_writable(array)
    plain = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    copy = np.ascontiguousarray(plain)
    located = _ARRAYS.locate(copy, False)
    assert located is not None  # dtype_of has accepted this type
    return Staged(located, array, copy)


def _require_no_overlap(
    shape: Sequence[int], strides: Sequence[int], unit: int, elements: str, cure: str
) -> None:
    """Raises `ValueError` if elements may share memory, since such an array cannot hold a result.

    `strides` count bytes for a NumPy array and elements for a tensor; `unit` is the size of one
    element in the same unit. The error text begins with `elements`.
    """
    if 0 in shape:
        return
    reach = unit
    for stride, length in sorted(zip(map(abs, strides), shape, strict=True)):
        if length > 1:
            if stride < reach:
                raise ValueError(
                    f"{elements} share memory, as after an expansion (shape "
                    f"{tuple(shape)}, strides {tuple(strides)}), so it cannot hold a result: give "
                    f"its {cure} instead"
                )
            reach += stride * (length - 1)


def _stage_tensor(tensor: Array, *, writable: bool) -> Staged:
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"expected a CPU tensor, but the tensor is on {tensor.device} (init_process_group("
            f"'cpu:unisono,{tensor.device.type}:...') names a backend for other devices)"
        )
    _require_strided(tensor)
    if writable:
        _require_writable(tensor)
    copy = tensor.detach().resolve_conj().resolve_neg().contiguous()
    located = _ARRAYS.locate(copy, True)
    if located is None:
        raise UnsupportedError(f"{type(tensor).__name__} has no memory that this process can read")
    return Staged(located, tensor.detach(), copy)


def stage_pieces(arrays: Sequence[Array], ranks: int, *, writable: bool, what: str) -> list[Staged]:
    """Returns the memory of `arrays`, one array per rank. Raises `ValueError` if their types
    differ.
    """
    if len(arrays) != ranks:
        raise ValueError(f"{what}: expected one array per rank, {ranks}, not {len(arrays)}")
    pieces = [stage(array, writable=writable) for array in arrays]
    if len({piece.located[2] for piece in pieces}) > 1:
        raise ValueError(f"{what}: expected arrays of one type, but their types differ")
    return pieces


def empty_like(like: Array, shape: tuple[int, ...]) -> Array:
    """Returns an uninitialised array of the same kind and type as `like`."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, like.dtype)
    return like.new_empty(shape)


def widened(array: Array, factor: float | None = None) -> Array:
    """Returns a contiguous float32 copy of 16- or 8-bit floats, which may have any strides.

    Multiplies each element by `factor`, a float32, if given.
    """
    source = stage(array, writable=False)
    shape = tuple(array.shape)
    if isinstance(array, np.ndarray):
        wide = np.empty(shape, np.float32)
    else:
        # Convert one element to find torch's float32 type, since torch starts threads to convert
        # larger tensors.
        float32 = array.new_empty(()).float().dtype
        wide = array.detach().new_empty(shape, dtype=float32)
    address = stage(wide, writable=True).located[0]
    native.widen(source.dtype, address, source.located[0], source.count, factor)
    return wide


def assign(target: Array, value: Array) -> None:
    """Copies `value` to `target` and converts the elements. Rounds like the C++ kernels."""
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
    """Returns a copy with its own memory."""
    return array.copy() if isinstance(array, np.ndarray) else array.detach().clone()


def overlap(a: Located, b: Located) -> bool:
    """Returns True if the two memory regions share bytes."""
    return a[0] < b[0] + b[1] and b[0] < a[0] + a[1]

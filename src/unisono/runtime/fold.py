"""What a REDUCE record computes, element by element: the definition the native kernels follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unisono.types import DType, ReduceOp

Array: TypeAlias = NDArray[Any]

_NUMPY: dict[DType, type[np.generic]] = {
    DType.FLOAT32: np.float32,
    DType.FLOAT64: np.float64,
    DType.FLOAT16: np.float16,
    DType.BFLOAT16: np.uint16,
    DType.INT8: np.int8,
    DType.UINT8: np.uint8,
    DType.INT16: np.int16,
    DType.UINT16: np.uint16,
    DType.INT32: np.int32,
    DType.UINT32: np.uint32,
    DType.INT64: np.int64,
    DType.UINT64: np.uint64,
    DType.BOOL: np.uint8,
    DType.COMPLEX64: np.complex64,
    DType.COMPLEX128: np.complex128,
}

_BOOL_AS = {
    ReduceOp.SUM: ReduceOp.BOR,
    ReduceOp.MAX: ReduceOp.BOR,
    ReduceOp.PROD: ReduceOp.BAND,
    ReduceOp.MIN: ReduceOp.BAND,
}


def fold(
    sources: Sequence[NDArray[np.uint8]], dtype: DType, op: ReduceOp, divisor: int = 1
) -> NDArray[np.uint8]:
    """Combine buffers of equal length from left to right; AVG then divides by `divisor`.

    16-bit floats accumulate in float32 and round once, to nearest even. Integers wrap, and
    their averages truncate toward zero. MIN and MAX give the first NaN, else the last of equal
    elements, with its bits unchanged. A boolean is a byte, true unless 0; results are 0 or 1.

    >>> x = np.array([1, 5], np.int16).view(np.uint8)
    >>> fold([x, x, x], DType.INT16, ReduceOp.AVG, 2).view(np.int16).tolist()
    [1, 7]
    """
    if dtype is DType.BOOL:
        op = _BOOL_AS.get(op, op)
    if dtype.is_narrow_float and op in (ReduceOp.MIN, ReduceOp.MAX):
        return _narrow_extreme(sources, dtype, op)
    combine = _complex_product if dtype.is_complex and op is ReduceOp.PROD else _COMBINE[op]
    with np.errstate(all="ignore"):
        acc = _load(sources[0], dtype)
        for source in sources[1:]:
            acc = combine(acc, _load(source, dtype))
        if op is ReduceOp.AVG and divisor != 1:
            acc = _divide(acc, divisor)
        return _store(acc, dtype)


def bfloat16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Exact: a bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even; every NaN becomes the same quiet one.

    >>> float32_to_bfloat16(np.array([1.0, 1.0039062], np.float32)).tolist()
    [16256, 16256]
    """
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _load(source: NDArray[np.uint8], dtype: DType) -> Array:
    # A copy: the source need not be aligned, and the result may be written over it.
    values: Array = source.copy().view(_NUMPY[dtype])
    if dtype is DType.BOOL:
        return np.asarray(values != 0, np.uint8)
    if dtype is DType.BFLOAT16:
        return bfloat16_to_float32(values)
    return values.astype(np.float32) if dtype is DType.FLOAT16 else values


def _store(acc: Array, dtype: DType) -> NDArray[np.uint8]:
    if dtype is DType.BFLOAT16:
        acc = float32_to_bfloat16(acc)
    elif dtype is DType.FLOAT16:
        acc = acc.astype(np.float16)
    return np.ascontiguousarray(acc).view(np.uint8)


def _divide(acc: Array, divisor: int) -> Array:
    if acc.dtype.kind == "c":
        real = acc.view(np.float32 if acc.dtype == np.complex64 else np.float64)
        return np.asarray(np.divide(real, divisor, dtype=real.dtype)).view(acc.dtype)
    if acc.dtype.kind == "f":
        return np.asarray(acc / acc.dtype.type(divisor))
    wide = acc if acc.dtype == np.uint64 else acc.astype(np.int64)
    quotient = wide // wide.dtype.type(divisor)
    inexact = quotient * wide.dtype.type(divisor) != wide
    return np.asarray((quotient + ((wide < 0) & inexact)).astype(acc.dtype))


def _narrow_extreme(
    sources: Sequence[NDArray[np.uint8]], dtype: DType, op: ReduceOp
) -> NDArray[np.uint8]:
    """Select among the 16-bit elements themselves: rounding would change the bits of a NaN."""
    bits, values = sources[0].copy().view(np.uint16), _load(sources[0], dtype)
    for source in sources[1:]:
        x = _load(source, dtype)
        keep = (values < x) if op is ReduceOp.MIN else (values > x)
        keep |= np.isnan(values)
        bits = np.where(keep, bits, source.copy().view(np.uint16))
        values = np.where(keep, values, x)
    return bits.view(np.uint8)


def _minimum(acc: Array, x: Array) -> Array:
    return np.where((acc < x) | np.isnan(acc), acc, x)


def _maximum(acc: Array, x: Array) -> Array:
    return np.where((acc > x) | np.isnan(acc), acc, x)


def _complex_product(acc: Array, x: Array) -> Array:
    # NumPy may fuse the multiplications and additions of its own complex product.
    result = np.empty_like(acc)
    result.real = acc.real * x.real - acc.imag * x.imag
    result.imag = acc.real * x.imag + acc.imag * x.real
    return result


_COMBINE: dict[ReduceOp, Callable[[Array, Array], Array]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: _minimum,
    ReduceOp.MAX: _maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}

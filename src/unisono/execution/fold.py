"""Defines the result of a REDUCE record (one instruction of a plan) for each element. The native
kernels give the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unisono.execution.narrow_floats import bits_of, narrowed, widened
from unisono.types import DType, ReduceOp

Array: TypeAlias = NDArray[Any]

_NUMPY: dict[DType, type[np.generic]] = {
    DType.FLOAT32: np.float32,
    DType.FLOAT64: np.float64,
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

PAIRS: dict[DType, tuple[type[np.generic], type[np.generic]]] = {
    DType.FLOAT32_INT32: (np.float32, np.int32),
    DType.FLOAT64_INT64: (np.float64, np.int64),
    DType.INT32_INT32: (np.int32, np.int32),
    DType.INT64_INT64: (np.int64, np.int64),
}
"""Types of value and index in pairs. Value and index are adjacent in memory."""

_BOOL_AS = {
    ReduceOp.SUM: ReduceOp.LOR,
    ReduceOp.MAX: ReduceOp.LOR,
    ReduceOp.BOR: ReduceOp.LOR,
    ReduceOp.PROD: ReduceOp.LAND,
    ReduceOp.MIN: ReduceOp.LAND,
    ReduceOp.BAND: ReduceOp.LAND,
    ReduceOp.BXOR: ReduceOp.LXOR,
}

_ARITHMETIC = (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG, ReduceOp.PREMUL_SUM)


def fold(
    sources: Sequence[NDArray[np.uint8]], dtype: DType, op: ReduceOp, divisor: int = 1
) -> NDArray[np.uint8]:
    """Combines buffers of equal length from left to right; AVG then divides by `divisor`.

    - Sums and products of 16- and 8-bit floats accumulate in float32 and round once, to nearest
      even.
    - A NaN in a sum, product or average becomes the quiet NaN without sign and payload; in 8 bits
      0x7F.
    - Integers wrap, and their averages truncate toward zero.
    - MIN and MAX return the first NaN, else the last of equal elements, with unchanged bits.
    - MINLOC and MAXLOC return the pair with a NaN, else with the best value. Among equal values, or
      several NaNs, the lowest index wins; among equal pairs the first.
    - Logical reductions take every value but 0 for true and return 0 or 1. Booleans are bytes and
      are always reduced this way.
    - PREMUL_SUM is SUM of contributions that are already multiplied.

    >>> x = np.array([1, 5], np.int16).view(np.uint8)
    >>> fold([x, x, x], DType.INT16, ReduceOp.AVG, 2).view(np.int16).tolist()
    [1, 7]
    """
    if dtype is DType.BOOL:
        op = _BOOL_AS.get(op, op)
    if dtype.is_narrow_float and op.selects:
        return _narrow_extreme(sources, dtype, op)
    if dtype.is_pair:
        return _best_pair(sources, dtype, op)
    if op.is_logical:
        sources = [_truth(source, dtype) for source in sources]
    combine = _complex_product if dtype.is_complex and op is ReduceOp.PROD else _COMBINE[op]
    with np.errstate(all="ignore"):
        acc = _load(sources[0], dtype)
        for source in sources[1:]:
            acc = combine(acc, _load(source, dtype))
        if op is ReduceOp.AVG and divisor != 1:
            acc = _divide(acc, divisor)
        if op in _ARITHMETIC and (len(sources) > 1 or divisor != 1):
            acc = _with_one_nan(acc)
        return _store(acc, dtype)


def _load(source: NDArray[np.uint8], dtype: DType) -> Array:
    # Copy the source, since it may be unaligned and the result may overwrite it.
    if dtype.is_narrow_float:
        return widened(bits_of(source.copy(), dtype), dtype)
    values: Array = source.copy().view(_NUMPY[dtype])
    return values


def _store(acc: Array, dtype: DType) -> NDArray[np.uint8]:
    if dtype.is_narrow_float:
        acc = narrowed(acc, dtype)
    return np.ascontiguousarray(acc).view(np.uint8)


def _truth(source: NDArray[np.uint8], dtype: DType) -> NDArray[np.uint8]:
    kind = _NUMPY[dtype]
    return np.asarray(source.copy().view(kind) != 0, kind).view(np.uint8)


def _with_one_nan(acc: Array) -> Array:
    if acc.dtype.kind == "c":
        return _with_one_nan(acc.view(acc.real.dtype)).view(acc.dtype)
    if acc.dtype.kind != "f":
        return acc
    return np.where(np.isnan(acc), acc.dtype.type(np.nan), acc)


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
    """Returns the minima or maxima with unchanged bits; a conversion to float32 and back would
    change NaNs.
    """
    bits, values = bits_of(sources[0].copy(), dtype), _load(sources[0], dtype)
    for source in sources[1:]:
        x = _load(source, dtype)
        keep = (values < x) if op is ReduceOp.MIN else (values > x)
        keep |= np.isnan(values)
        bits = np.where(keep, bits, bits_of(source.copy(), dtype))
        values = np.where(keep, values, x)
    return bits.view(np.uint8)


def _best_pair(
    sources: Sequence[NDArray[np.uint8]], dtype: DType, op: ReduceOp
) -> NDArray[np.uint8]:
    value_kind, index_kind = PAIRS[dtype]
    kind = np.dtype([("value", value_kind), ("index", index_kind)])
    acc = sources[0].copy().view(kind)
    for source in sources[1:]:
        x = source.copy().view(kind)
        a, b = acc["value"], x["value"]
        a_nan, b_nan = np.isnan(a), np.isnan(b)
        better = (b < a) if op is ReduceOp.MINLOC else (b > a)
        tied = (a == b) | (a_nan & b_nan)
        take = better | (b_nan & ~a_nan) | (tied & (x["index"] < acc["index"]))
        acc = np.where(take, x, acc)
    return acc.view(np.uint8)


def _minimum(acc: Array, x: Array) -> Array:
    return np.where((acc < x) | np.isnan(acc), acc, x)


def _maximum(acc: Array, x: Array) -> Array:
    return np.where((acc > x) | np.isnan(acc), acc, x)


def _complex_product(acc: Array, x: Array) -> Array:
    # NumPy's own complex product is not used: it may fuse multiplications and additions, and so
    # round differently.
    result = np.empty_like(acc)
    result.real = acc.real * x.real - acc.imag * x.imag
    result.imag = acc.real * x.imag + acc.imag * x.real
    return result


_COMBINE: dict[ReduceOp, Callable[[Array, Array], Array]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PREMUL_SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: _minimum,
    ReduceOp.MAX: _maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
    ReduceOp.LAND: np.bitwise_and,
    ReduceOp.LOR: np.bitwise_or,
    ReduceOp.LXOR: np.bitwise_xor,
}

"""Conversions between float32 and 16- and 8-bit floats, in NumPy; they define the library's
rounding.

NumPy has float16; this module makes the other formats from bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.types import DType

Floats = NDArray[np.float32]
_BITS: dict[DType, type[np.generic]] = {
    DType.FLOAT16: np.uint16,
    DType.BFLOAT16: np.uint16,
    DType.FLOAT8_E4M3FN: np.uint8,
    DType.FLOAT8_E5M2: np.uint8,
}


def bits_of(data: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Returns a view of the elements as unsigned integers of the same size.

    >>> bits_of(np.array([1], np.float16), DType.FLOAT16).tolist()
    [15360]
    """
    return data.view(_BITS[dtype])


def widened(bits: NDArray[Any], dtype: DType) -> Floats:
    """Returns the exact values of narrow floats, given their bits. A NaN keeps its sign.

    >>> widened(np.array([0x38, 0x7E, 0xFF], np.uint8), DType.FLOAT8_E4M3FN).tolist()
    [1.0, 448.0, nan]
    """
    if dtype is DType.FLOAT16:
        values = bits.view(np.float16).astype(np.float32)
        quiet = np.isnan(values) * np.uint32(1 << 22)  # makes a NaN quiet, as CPUs do
        return np.asarray((values.view(np.uint32) | quiet).view(np.float32))
    if dtype is DType.BFLOAT16:
        return bfloat16_to_float32(bits)
    return np.asarray(_values(dtype)[bits])


def narrowed(values: Floats, dtype: DType) -> NDArray[Any]:
    """Returns the bits of the nearest narrow floats, ties to even.

    A value that is too large becomes infinity; in float8_e4m3fn, which has no infinity, it becomes
    448 (as torch casts). Every NaN becomes the same NaN without sign: quiet without payload, in 8
    bits 0x7F.

    >>> narrowed(np.array([1, 500, np.nan], np.float32), DType.FLOAT8_E4M3FN).tolist()
    [56, 126, 127]
    """
    if dtype is DType.FLOAT16:
        with np.errstate(over="ignore", invalid="ignore"):
            halves = values.astype(np.float16).view(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7E00), halves)
    if dtype is DType.BFLOAT16:
        return float32_to_bfloat16(values)
    # The result depends only on the upper half of the float32 and on whether its lower half is 0.
    # The latter matters only for ties.
    word = values.view(np.uint32)
    return np.asarray(_roundings(dtype)[word >> 16 | (word & 0xFFFF != 0)])


def bfloat16_to_float32(bits: NDArray[np.uint16]) -> Floats:
    """Converts exactly: a bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: Floats) -> NDArray[np.uint16]:
    """Rounds to the nearest bfloat16, ties to even; every NaN becomes the same quiet NaN.

    >>> float32_to_bfloat16(np.array([1.0, 1.0039062], np.float32)).tolist()
    [16256, 16256]
    """
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """A floating-point format of one byte: a sign, an exponent, and `fraction` bits."""

    fraction: int
    bias: int
    largest: int
    """Bits of the largest magnitude that is not a NaN: infinity, if the format has it."""


_FORMATS = {
    DType.FLOAT8_E4M3FN: _Format(fraction=3, bias=7, largest=0x7E),
    DType.FLOAT8_E5M2: _Format(fraction=2, bias=15, largest=0x7C),
}


@functools.cache
def _values(dtype: DType) -> Floats:
    """Returns the value that each byte encodes."""
    form = _FORMATS[dtype]
    magnitude = np.arange(128)
    exponent, rest = magnitude >> form.fraction, magnitude & ((1 << form.fraction) - 1)
    significand = rest + np.where(exponent > 0, 1 << form.fraction, 0)
    values = np.ldexp(significand, np.maximum(exponent, 1) - form.bias - form.fraction)
    if dtype is DType.FLOAT8_E5M2:
        values[form.largest] = np.inf
    values[form.largest + 1 :] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


@functools.cache
def _roundings(dtype: DType) -> NDArray[np.uint8]:
    """Returns a table of the bytes to which float32 values round.

    The index is the upper half of the float32, but the index's lowest bit is also set if any bit of
    the lower half is set. The upper half has enough bits for correct rounding to a byte.
    """
    form = _FORMATS[dtype]
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    magnitude = np.minimum(np.abs(values, dtype=np.float64), 1e9)
    least = 1 - form.bias  # the exponent of subnormal numbers and of 0
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, least)
    exponent[magnitude == 0] = least
    # Significands in units of the last place. If a significand rounds up to the next power of 2,
    # the sum below still encodes the value correctly.
    units = np.rint(np.ldexp(magnitude, form.fraction - exponent))
    encoded = units + ((exponent + form.bias - 1) << form.fraction)
    bits = np.minimum(encoded, form.largest)
    bits = np.where(np.signbit(values), bits + 128, bits)
    return np.where(np.isnan(values), 127, bits).astype(np.uint8)

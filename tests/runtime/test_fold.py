from __future__ import annotations

from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from unisono.runtime.fold import fold
from unisono.runtime.narrow import bfloat16_to_float32, float32_to_bfloat16
from unisono.types import DType, ReduceOp

INTEGERS: dict[DType, type[np.integer[Any]]] = {
    DType.INT8: np.int8,
    DType.UINT8: np.uint8,
    DType.INT16: np.int16,
    DType.UINT16: np.uint16,
    DType.INT32: np.int32,
    DType.UINT32: np.uint32,
    DType.INT64: np.int64,
    DType.UINT64: np.uint64,
}


def raw(values: object, dtype: type) -> NDArray[np.uint8]:
    return np.array(values, dtype).view(np.uint8)


def wrap(value: int, dtype: type) -> int:
    bits = np.dtype(dtype).itemsize * 8
    value &= (1 << bits) - 1
    signed = np.issubdtype(dtype, np.signedinteger)
    return value - (1 << bits) if signed and value >> (bits - 1) else value


@given(data=st.data())
@settings(deadline=None)
def test_integers_wrap(data: st.DataObject) -> None:
    dtype, kind = data.draw(st.sampled_from(list(INTEGERS.items())))
    info = np.iinfo(kind)
    values = data.draw(st.lists(st.integers(int(info.min), int(info.max)), min_size=1, max_size=5))
    sources = [raw([value], kind) for value in values]
    expected = {
        ReduceOp.SUM: sum(values),
        ReduceOp.PROD: reduce(lambda a, b: a * b, values),
        ReduceOp.MIN: min(values),
        ReduceOp.MAX: max(values),
        ReduceOp.BAND: reduce(lambda a, b: a & b, values),
        ReduceOp.BOR: reduce(lambda a, b: a | b, values),
        ReduceOp.BXOR: reduce(lambda a, b: a ^ b, values),
    }
    for op, value in expected.items():
        assert fold(sources, dtype, op).view(kind)[0] == wrap(value, kind), op


@given(data=st.data())
@settings(deadline=None)
def test_integer_averages_truncate_toward_zero(data: st.DataObject) -> None:
    dtype, kind = data.draw(st.sampled_from(list(INTEGERS.items())))
    info = np.iinfo(kind)
    values = data.draw(st.lists(st.integers(int(info.min), int(info.max)), min_size=2, max_size=5))
    divisor = len(values)
    total = wrap(sum(values), kind)
    quotient = abs(total) // divisor * (1 if total >= 0 else -1)
    sources = [raw([value], kind) for value in values]
    assert fold(sources, dtype, ReduceOp.AVG, divisor).view(kind)[0] == quotient


def test_an_average_by_more_ranks_than_the_type_can_count() -> None:
    x = raw([-128, 127, 5], np.int8)
    assert fold([x], DType.INT8, ReduceOp.AVG, 1000).view(np.int8).tolist() == [0, 0, 0]


def test_an_average_without_divisor_is_a_sum() -> None:
    x = raw([3], np.float32)
    assert fold([x, x], DType.FLOAT32, ReduceOp.AVG).view(np.float32)[0] == 6
    assert fold([x, x], DType.FLOAT32, ReduceOp.AVG, 2).view(np.float32)[0] == 3


def test_float16_rounds_once() -> None:
    sources = [raw([x], np.float16) for x in (2048, 1, 1)]
    assert fold(sources, DType.FLOAT16, ReduceOp.SUM).view(np.float16)[0] == 2050
    sources = [raw([x], np.float16) for x in (60000, 60000, -60000)]
    assert fold(sources, DType.FLOAT16, ReduceOp.SUM).view(np.float16)[0] == 60000


def test_bfloat16_rounds_once() -> None:
    sources = [float32_to_bfloat16(np.array([x], np.float32)) for x in (256, 1, 1)]
    total = fold([s.view(np.uint8) for s in sources], DType.BFLOAT16, ReduceOp.SUM)
    assert bfloat16_to_float32(total.view(np.uint16))[0] == 258


def test_every_bfloat16_survives_conversion() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bfloat16_to_float32(bits)
    back = float32_to_bfloat16(values)
    numbers = ~np.isnan(values)
    assert (back[numbers] == bits[numbers]).all()
    assert np.isnan(bfloat16_to_float32(back[~numbers])).all()


@given(st.floats(width=32, allow_nan=False))
@settings(deadline=None)
def test_bfloat16_takes_the_nearest_and_ties_to_even(value: float) -> None:
    x = np.array([value], np.float32)
    got = int(float32_to_bfloat16(x)[0])
    low = int(x.view(np.uint32)[0]) >> 16  # toward zero; the next one is away from zero
    low_value, high_value = (
        float(v) for v in bfloat16_to_float32(np.array([low, low + 1], np.uint16))
    )
    if abs(value) > 3.3895313892515355e38 or np.isinf(value):
        return  # beyond the largest finite value; see the test of overflow
    below, above = abs(value - low_value), abs(high_value - value)
    nearest = low if below < above or (below == above and low % 2 == 0) else low + 1
    assert got == nearest


def test_bfloat16_overflows_to_infinity() -> None:
    largest = np.array([np.finfo(np.float32).max, np.inf, -np.inf], np.float32)
    assert bfloat16_to_float32(float32_to_bfloat16(largest)).tolist() == [np.inf, np.inf, -np.inf]


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(DType.FLOAT16, np.float16), (DType.FLOAT32, np.float32), (DType.FLOAT64, np.float64)],
)
def test_nan_propagates_from_any_place(op: ReduceOp, dtype: DType, kind: type) -> None:
    rows = [[np.nan, 1, 2], [1, np.nan, 2], [1, 2, np.nan]]
    for row in rows:
        assert np.isnan(fold([raw([x], kind) for x in row], dtype, op).view(kind)[0])


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_extremes_of_narrow_floats_keep_the_bits_of_the_first_nan(dtype: DType) -> None:
    signaling, quiet, one = 0x7F81, 0xFFC5, 0x3F80
    if dtype is DType.FLOAT16:
        signaling, quiet, one = 0x7C01, 0xFE05, 0x3C00
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        rows = [raw([x], np.uint16) for x in (one, signaling, quiet)]
        assert fold(rows, dtype, op).view(np.uint16)[0] == signaling
        assert fold(rows[::-1], dtype, op).view(np.uint16)[0] == quiet
    rows = [raw([x], np.uint16) for x in (one, 0x8000 | one, one)]
    assert fold(rows, dtype, ReduceOp.MIN).view(np.uint16)[0] == 0x8000 | one
    assert fold(rows, dtype, ReduceOp.MAX).view(np.uint16)[0] == one


def test_any_byte_but_zero_is_true() -> None:
    a, b = raw([0, 2, 4], np.uint8), raw([0, 0, 8], np.uint8)
    assert fold([a, b], DType.BOOL, ReduceOp.SUM).tolist() == [0, 1, 1]
    assert fold([a, b], DType.BOOL, ReduceOp.BAND).tolist() == [0, 0, 1]
    assert fold([a, b], DType.BOOL, ReduceOp.BXOR).tolist() == [0, 1, 0]


def test_equal_elements_keep_the_later_one() -> None:
    zeros = [raw([0.0], np.float32), raw([-0.0], np.float32)]
    assert np.signbit(fold(zeros, DType.FLOAT32, ReduceOp.MIN).view(np.float32)[0])
    assert np.signbit(fold(zeros, DType.FLOAT32, ReduceOp.MAX).view(np.float32)[0])


def test_booleans() -> None:
    a, b = raw([0, 0, 1, 1], np.uint8), raw([0, 1, 0, 1], np.uint8)
    results = {
        op: fold([a, b], DType.BOOL, op).tolist() for op in ReduceOp if DType.BOOL.supports(op)
    }
    either, both = [0, 1, 1, 1], [0, 0, 0, 1]
    assert results == {
        ReduceOp.SUM: either,
        ReduceOp.MAX: either,
        ReduceOp.BOR: either,
        ReduceOp.PROD: both,
        ReduceOp.MIN: both,
        ReduceOp.BAND: both,
        ReduceOp.BXOR: [0, 1, 1, 0],
    }


@pytest.mark.parametrize(
    ("dtype", "kind"), [(DType.COMPLEX64, np.complex64), (DType.COMPLEX128, np.complex128)]
)
def test_complex_numbers(dtype: DType, kind: type) -> None:
    sources = [raw([x], kind) for x in (1 + 2j, 3 - 1j)]
    assert fold(sources, dtype, ReduceOp.SUM).view(kind)[0] == 4 + 1j
    assert fold(sources, dtype, ReduceOp.AVG, 2).view(kind)[0] == 2 + 0.5j
    assert fold(sources, dtype, ReduceOp.PROD).view(kind)[0] == 5 + 5j


def test_the_order_is_left_to_right() -> None:
    rows = np.random.default_rng(7).normal(size=(6, 99)).astype(np.float32)
    expected = rows[0]
    for _, row in pairwise(rows):
        expected = expected + row
    got = fold([row.view(np.uint8) for row in rows], DType.FLOAT32, ReduceOp.SUM)
    assert got.tobytes() == expected.tobytes()


def test_the_sources_are_left_alone() -> None:
    x = raw([1, 2, 3], np.int32)
    before = x.copy()
    result = fold([x], DType.INT32, ReduceOp.SUM)
    result[:] = 0
    assert (x == before).all()


def test_what_types_support() -> None:
    assert {d for d in DType if not d.supports(ReduceOp.AVG)} == {DType.BOOL}
    assert {d for d in DType if d.supports(ReduceOp.BAND)} == {*INTEGERS, DType.BOOL}
    unordered = {DType.COMPLEX64, DType.COMPLEX128}
    assert {d for d in DType if not d.supports(ReduceOp.MIN)} == unordered
    assert all(d.supports(ReduceOp.SUM) and d.supports(ReduceOp.PROD) for d in DType)

from __future__ import annotations

from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from unisono.execution.fold import PAIRS, fold
from unisono.execution.narrow_floats import narrowed, widened
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


def test_an_average_of_more_ranks_than_the_type_can_count() -> None:
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
    sources = [narrowed(np.array([x], np.float32), DType.BFLOAT16) for x in (256, 1, 1)]
    total = fold([s.view(np.uint8) for s in sources], DType.BFLOAT16, ReduceOp.SUM)
    assert widened(total.view(np.uint16), DType.BFLOAT16)[0] == 258


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(DType.FLOAT16, np.float16), (DType.FLOAT32, np.float32), (DType.FLOAT64, np.float64)],
)
def test_nan_propagates_from_any_operand(op: ReduceOp, dtype: DType, kind: type) -> None:
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


def test_booleans_reduce_logically() -> None:
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
        ReduceOp.LAND: both,
        ReduceOp.LOR: either,
        ReduceOp.LXOR: [0, 1, 1, 0],
    }


@pytest.mark.parametrize(
    ("dtype", "kind"), [(DType.COMPLEX64, np.complex64), (DType.COMPLEX128, np.complex128)]
)
def test_complex_numbers_reduce_like_numpy(dtype: DType, kind: type) -> None:
    sources = [raw([x], kind) for x in (1 + 2j, 3 - 1j)]
    assert fold(sources, dtype, ReduceOp.SUM).view(kind)[0] == 4 + 1j
    assert fold(sources, dtype, ReduceOp.AVG, 2).view(kind)[0] == 2 + 0.5j
    assert fold(sources, dtype, ReduceOp.PROD).view(kind)[0] == 5 + 5j


def test_fold_goes_from_left_to_right() -> None:
    rows = np.random.default_rng(7).normal(size=(6, 99)).astype(np.float32)
    expected = rows[0]
    for _, row in pairwise(rows):
        expected = expected + row
    got = fold([row.view(np.uint8) for row in rows], DType.FLOAT32, ReduceOp.SUM)
    assert got.tobytes() == expected.tobytes()


def test_fold_does_not_change_the_sources() -> None:
    x = raw([1, 2, 3], np.int32)
    before = x.copy()
    result = fold([x], DType.INT32, ReduceOp.SUM)
    result[:] = 0
    assert (x == before).all()


def test_types_support_the_documented_reductions() -> None:
    pairs, numbers = set(PAIRS), set(DType) - set(PAIRS)

    def serving(op: ReduceOp) -> set[DType]:
        return {dtype for dtype in DType if dtype.supports(op)}

    for op in (ReduceOp.MINLOC, ReduceOp.MAXLOC):
        assert serving(op) == pairs == {d for d in DType if d.is_pair}
    for op in (ReduceOp.SUM, ReduceOp.PROD):
        assert serving(op) == numbers
    for op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM):
        assert serving(op) == numbers - {DType.BOOL}
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        assert serving(op) == numbers - {DType.COMPLEX64, DType.COMPLEX128}
    for op in ReduceOp:
        if op.is_bitwise or op.is_logical:
            assert serving(op) == {*INTEGERS, DType.BOOL}


@given(data=st.data())
@settings(deadline=None)
def test_logical_reductions_equal_numpy(data: st.DataObject) -> None:
    dtype, kind = data.draw(st.sampled_from(list(INTEGERS.items())))
    element = st.sampled_from([0, 0, 1, 2, int(np.iinfo(kind).max), int(np.iinfo(kind).min)])
    ranks = data.draw(st.integers(1, 5))
    rows = np.array(data.draw(st.lists(st.tuples(*[element] * ranks), max_size=9)), kind)
    sources = [row.view(np.uint8) for row in rows.reshape(-1, ranks).T.copy()]
    for op, function in (
        (ReduceOp.LAND, np.logical_and),
        (ReduceOp.LOR, np.logical_or),
        (ReduceOp.LXOR, np.logical_xor),
    ):
        expected = function.reduce(rows.reshape(-1, ranks), axis=1)
        assert fold(sources, dtype, op).view(kind).tolist() == expected.astype(kind).tolist()


@given(data=st.data())
@settings(deadline=None)
def test_the_index_of_an_extreme_equals_numpy(data: st.DataObject) -> None:
    """Compares with argmin and argmax, which return the first index of equal values or NaNs."""
    dtype, (value, index) = data.draw(st.sampled_from(list(PAIRS.items())))
    numbers: st.SearchStrategy[Any] = st.integers(-2, 2)
    if value in (np.float32, np.float64):
        numbers |= st.sampled_from([np.nan, -0.0, np.inf, -np.inf])
    ranks = data.draw(st.integers(1, 6))
    columns = data.draw(st.lists(st.tuples(*[numbers] * ranks), max_size=9))
    values = np.array(columns, value).reshape(-1, ranks)
    order = data.draw(st.permutations(range(ranks)))
    sources = []
    for rank in order:  # the result must not depend on the order of the operands
        pair = np.zeros(len(values), [("value", value), ("index", index)])
        pair["value"], pair["index"] = values[:, rank], rank
        sources.append(pair.view(np.uint8))
    for op, best in ((ReduceOp.MINLOC, np.argmin), (ReduceOp.MAXLOC, np.argmax)):
        found = fold(sources, dtype, op).view([("value", value), ("index", index)])
        place = np.array([best(row) for row in values], int)
        assert found["index"].tolist() == place.tolist()
        expected = values[np.arange(len(values)), place]
        assert found["value"].tobytes() == expected.tobytes()


def test_of_equal_pairs_the_first_keeps_its_bits() -> None:
    kind = [("value", np.float32), ("index", np.int32)]
    plus, minus = np.array([(0.0, 1)], kind), np.array([(-0.0, 1)], kind)
    sources = [minus.view(np.uint8), plus.view(np.uint8)]
    for op in (ReduceOp.MINLOC, ReduceOp.MAXLOC):
        assert np.signbit(fold(sources, DType.FLOAT32_INT32, op).view(kind)["value"][0])


@pytest.mark.parametrize("dtype", [DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2])
def test_8_bit_floats_round_once(dtype: DType) -> None:
    def of(*values: float) -> list[NDArray[np.uint8]]:
        return [narrowed(np.array([value], np.float32), dtype) for value in values]

    def value(op: ReduceOp, *values: float, divisor: int = 1) -> float:
        return float(widened(fold(of(*values), dtype, op, divisor), dtype)[0])

    # The sum is not rounded after each addition; that would give 16, since 16 + 0.5 = 16.
    assert value(ReduceOp.SUM, 16, *[0.5] * 8) == 20
    assert value(ReduceOp.AVG, 448, 448, 448, divisor=3) == 448
    assert value(ReduceOp.PROD, 256, 256, 1 / 256) == 256
    largest = 448 if dtype is DType.FLOAT8_E4M3FN else np.inf
    assert value(ReduceOp.PROD, -256, 256, 2) == -largest
    assert np.isnan(value(ReduceOp.SUM, np.nan, 1))
    assert np.isnan(value(ReduceOp.MIN, 1, np.nan, 0))
    assert value(ReduceOp.MAX, -2, -1, -3) == -1
    assert fold(of(-np.nan, 1), dtype, ReduceOp.SUM).tolist() == [0x7F]


def test_a_scaled_sum_is_a_sum() -> None:
    x = raw([1.5, 2], np.float32)
    assert fold([x, x], DType.FLOAT32, ReduceOp.PREMUL_SUM).view(np.float32).tolist() == [3, 4]

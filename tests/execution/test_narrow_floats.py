"""Every rounding is to the nearest value, with ties to even. 8-bit results equal torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from unisono.execution.narrow_floats import (
    bfloat16_to_float32,
    bits_of,
    float32_to_bfloat16,
    narrowed,
    widened,
)
from unisono.types import DType

FLOAT8 = [DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2]
EVERY = np.arange(256, dtype=np.uint8)


def test_every_bfloat16_survives_conversion() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bfloat16_to_float32(bits)
    back = float32_to_bfloat16(values)
    numbers = ~np.isnan(values)
    assert (back[numbers] == bits[numbers]).all()
    assert np.isnan(bfloat16_to_float32(back[~numbers])).all()


@given(st.floats(width=32, allow_nan=False))
@settings(deadline=None)
def test_bfloat16_rounds_to_nearest_even(value: float) -> None:
    x = np.array([value], np.float32)
    got = int(float32_to_bfloat16(x)[0])
    # `low` is the value rounded toward zero, and `low + 1` the value rounded away from zero
    low = int(x.view(np.uint32)[0]) >> 16
    low_value, high_value = (
        float(v) for v in bfloat16_to_float32(np.array([low, low + 1], np.uint16))
    )
    if abs(value) > 3.3895313892515355e38 or np.isinf(value):
        return  # beyond the largest finite value; another test covers overflow
    below, above = abs(value - low_value), abs(high_value - value)
    nearest = low if below < above or (below == above and low % 2 == 0) else low + 1
    assert got == nearest


def test_bfloat16_overflows_to_infinity() -> None:
    largest = np.array([np.finfo(np.float32).max, np.inf, -np.inf], np.float32)
    assert bfloat16_to_float32(float32_to_bfloat16(largest)).tolist() == [np.inf, np.inf, -np.inf]


def many_floats() -> NDArray[np.float32]:
    """Returns floats with all upper halves and several lower halves, including all ties and their
    neighbours.
    """
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = [0, 1, 0x7FFF, 0x8000, 0xFFFF]
    rng = np.random.default_rng(0)
    words = [*(upper | half for half in lower), rng.integers(0, 1 << 32, 100_000, np.uint32)]
    return np.concatenate(words).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_8_bit_floats_equal_torch(dtype: DType) -> None:
    torch = pytest.importorskip("torch")
    theirs: Any = getattr(torch, dtype.name.lower())
    values = torch.from_numpy(EVERY).view(theirs).float().numpy()
    np.testing.assert_array_equal(widened(EVERY, dtype), values)
    np.testing.assert_array_equal(np.signbit(widened(EVERY, dtype)), np.signbit(values))
    x = many_floats()
    cast = torch.from_numpy(x).to(theirs).view(torch.uint8).numpy()
    found = narrowed(x, dtype)
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(found[numbers], cast[numbers])
    assert set(found[~numbers].tolist()) == {0x7F}  # torch keeps the sign of a NaN
    assert set((cast[~numbers] & 0x7F).tolist()) == {0x7F}


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_8_bit_float_survives_conversion(dtype: DType) -> None:
    values = widened(EVERY, dtype)
    numbers = ~np.isnan(values)
    assert (narrowed(values, dtype)[numbers] == EVERY[numbers]).all()
    assert np.isnan(widened(narrowed(values, dtype), dtype)[~numbers]).all()
    assert int((~numbers).sum()) == (2 if dtype is DType.FLOAT8_E4M3FN else 6)


@given(value=st.floats(width=32, allow_nan=False), dtype=st.sampled_from(FLOAT8))
@settings(deadline=None)
def test_8_bit_floats_round_to_nearest_even(value: float, dtype: DType) -> None:
    values = widened(EVERY, dtype).astype(np.float64)
    largest = float(values[np.isfinite(values)].max())
    found = int(narrowed(np.array([value], np.float32), dtype)[0])
    assert (found >= 128) == np.signbit(value)
    if abs(value) >= largest:
        step = largest - float(values[values < largest].max())
        beyond = dtype is DType.FLOAT8_E5M2 and abs(value) >= largest + step / 2
        assert abs(values[found]) == (np.inf if beyond else largest)
        return
    distance = np.abs(values - value)
    nearest = np.flatnonzero(distance == np.nanmin(distance))
    assert found in nearest
    assert found % 2 == 0 or len({float(values[i]) for i in nearest}) == 1


def test_bits_of_returns_a_view() -> None:
    x = np.ones(2, np.float16)
    bits_of(x, DType.FLOAT16)[:] = 0
    assert x.tolist() == [0, 0]

"""Conversions and products in the C++ core have the same bits as those of
`execution/narrow_floats.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from unisono import native
from unisono.communicator.arrays import assign, widened
from unisono.communicator.premul import scale
from unisono.execution import narrow_floats
from unisono.types import DType

torch = pytest.importorskip("torch")

NARROW = [dtype for dtype in DType if dtype.is_narrow_float]


def every(dtype: DType) -> NDArray[Any]:
    """Returns all elements that a type has, as bits."""
    count = 1 << 8 * dtype.size_bytes
    return np.arange(count, dtype=np.uint8 if dtype.is_float8 else np.uint16)


def native_widened(bits: NDArray[Any], dtype: DType, *factor: float) -> NDArray[np.float32]:
    out = np.empty(bits.size, np.float32)
    native.widen(dtype, out.ctypes.data, bits.ctypes.data, bits.size, *factor)
    return out


def native_narrowed(values: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    out = np.empty(values.size, every(dtype).dtype)
    native.narrow(dtype, out.ctypes.data, values.ctypes.data, values.size)
    return out


@pytest.mark.parametrize("dtype", NARROW)
def test_every_element_widens_as_defined(dtype: DType) -> None:
    bits = every(dtype)
    assert native_widened(bits, dtype).tobytes() == narrow_floats.widened(bits, dtype).tobytes()
    numbers = bits[~np.isnan(narrow_floats.widened(bits, dtype))]
    third = np.float32(1 / 3)
    products = narrow_floats.widened(numbers, dtype) * third
    assert native_widened(numbers, dtype, float(third)).tobytes() == products.tobytes()


@pytest.mark.parametrize("dtype", NARROW)
def test_floats_round_as_defined(dtype: DType) -> None:
    rng = np.random.default_rng(1)
    upper = (np.arange(1 << 16, dtype=np.uint32) << 16)[:, None]
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    anything = rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    values = np.concatenate([(upper | lower).ravel(), anything]).view(np.float32)
    assert (
        native_narrowed(values, dtype).tobytes() == narrow_floats.narrowed(values, dtype).tobytes()
    )


@pytest.mark.parametrize("dtype", NARROW)
def test_products_round_once_to_their_type(dtype: DType) -> None:
    bits = every(dtype)
    for factor in np.array([1 / 3, -700, 1e-6, np.inf], np.float32):
        with np.errstate(all="ignore"):
            expected = narrow_floats.narrowed(narrow_floats.widened(bits, dtype) * factor, dtype)
        out = np.empty_like(bits)
        native.scale(dtype, out.ctypes.data, bits.ctypes.data, bits.size, factor.tobytes())
        assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.size_bytes > 1][:2])
def test_a_nan_in_a_product_is_always_the_same(dtype: DType) -> None:
    x = np.array([np.inf, -np.inf, np.nan, -np.nan, 1], "f4" if dtype is DType.FLOAT32 else "f8")
    scale(x, 0)
    quiet = np.array([np.nan], x.dtype)
    assert x[:4].tobytes() == quiet.tobytes() * 4
    assert x[4] == 0


def test_arrays_of_any_strides_are_converted() -> None:
    x = np.arange(24, dtype=np.float16).reshape(4, 6)
    wide = widened(x.T[::2])
    assert wide.shape == (3, 4)
    assert (wide == x.T[::2].astype(np.float32)).all()
    assign(x.T[::2], wide * 3)
    assert x[1].tolist() == [18, 7, 24, 9, 30, 11]
    for kind in (torch.bfloat16, torch.float8_e5m2, torch.float16):
        y = torch.arange(24).reshape(4, 6).to(kind)
        wide = widened(y.t()[::2], 0.5)
        assert torch.equal(wide, y.t()[::2].float() * 0.5)
        assign(y.t()[::2], wide)
        assert torch.equal(y[:, ::2].t().float(), wide.to(kind).float())
        assert torch.equal(y[:, 1].float(), torch.arange(24).reshape(4, 6)[:, 1].to(kind).float())
    empty = widened(np.empty((0, 3), np.float16))
    assert empty.shape == (0, 3)


@pytest.mark.parametrize("wrong", [DType.FLOAT32, DType.INT8, 99])
def test_only_narrow_floats_are_converted(wrong: int) -> None:
    with pytest.raises(Exception, match="number of a 16- or 8-bit float type"):
        native.widen(wrong, 0, 0, 0)
    with pytest.raises(Exception, match=r"expected the number of a type|expected a factor of"):
        native.scale(wrong, 0, 0, 0, b"")

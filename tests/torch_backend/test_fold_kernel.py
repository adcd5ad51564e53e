"""The reduction kernels of devices, compiled for the CPU and compared with the definition."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from torch_backend.cpu_kernels import build, for_cpu, with_device
from unisono.execution.fold import fold
from unisono.torch_backend.device.fold_kernel import _COMBINE, _TYPES, _Arrays, fold_source
from unisono.types import DType, ReduceOp

pytestmark = pytest.mark.torch
CASES = [(dtype, op) for dtype in _TYPES for op in _COMBINE if dtype.supports(op)]
RANKS, NBYTES = 3, 48 * 64 + 32


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    parts = []
    for number, (dtype, op) in enumerate(CASES):
        source = for_cpu(fold_source(dtype, op))
        source = source.replace(" fold_vectors(", f" fold_vectors_{number}(")
        source = source.replace(" fold_elements(", f" fold_elements_{number}(")
        parts.append(f"namespace kernel_{number} {{ {source} }}")
    folder = tmp_path_factory.mktemp("kernels")
    return ctypes.CDLL(str(build(with_device("\n".join(parts)), folder)))


def contributions(dtype):
    """Returns arrays of all bit patterns, without NaNs, whose bits a device may choose."""
    drawn = np.random.default_rng(int(dtype)).integers(0, 256, (RANKS, NBYTES), np.uint8)
    if dtype is DType.BOOL:
        return drawn & 1
    if dtype in (DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128):
        kind = np.float64 if dtype in (DType.FLOAT64, DType.COMPLEX128) else np.float32
        values = drawn[:, :: np.dtype(kind).itemsize].astype(kind) / 7 - 18
        return values.view(np.uint8)
    return drawn


def is_nan(found, dtype):
    """Returns which elements are NaN, as bytes."""
    if not dtype.is_narrow_float:
        return np.zeros(len(found), bool)
    from unisono.execution.fold import bits_of, widened

    return np.repeat(np.isnan(widened(bits_of(found, dtype), dtype)), dtype.size_bytes)


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=[f"{d.name}-{o.name}" for d, o in CASES])
@pytest.mark.parametrize("kernel", ["vectors", "elements"])
def test_kernel_equals_the_definition(library, dtype, op, kernel):
    sources = contributions(dtype)
    targets = np.zeros((2, NBYTES), np.uint8)
    arrays = _Arrays(sources=RANKS, targets=2)
    arrays.source[:RANKS] = [each.ctypes.data for each in sources]
    arrays.target[:2] = [each.ctypes.data for each in targets]
    size = 16 if kernel == "vectors" else dtype.size_bytes
    run = getattr(library, f"fold_{kernel}_{CASES.index((dtype, op))}")
    run.argtypes = [_Arrays, ctypes.c_uint64, ctypes.c_int]
    run(arrays, NBYTES // size, RANKS)
    with np.errstate(all="ignore"):
        expected = fold(list(sources), dtype, op, RANKS if op is ReduceOp.AVG else 1)
    both = is_nan(expected, dtype) & is_nan(targets[0], dtype)
    assert np.array_equal(np.where(both, 0, targets[0]), np.where(both, 0, expected))
    assert np.array_equal(targets[0], targets[1])

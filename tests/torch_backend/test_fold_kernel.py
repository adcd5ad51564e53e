"""The reduction kernels of devices, compiled for the CPU and compared with the definition."""

from __future__ import annotations

import ctypes
import subprocess

import numpy as np
import pytest

from unisono.execution.fold import fold
from unisono.torch_backend.device.fold_kernel import _COMBINE, _TYPES, _Arrays, fold_source
from unisono.types import DType, ReduceOp

pytestmark = pytest.mark.torch
CASES = [(dtype, op) for dtype in _TYPES for op in _COMBINE if dtype.supports(op)]
RANKS, NBYTES = 3, 48 * 64 + 32

_DEVICE = r"""
#include <cmath>
#include <cstring>
#define __device__ static inline
#define __global__
struct Place { unsigned x; };
static const Place gridDim{1}, blockDim{1}, blockIdx{0}, threadIdx{0};
static inline float __uint_as_float(unsigned x) { float f; std::memcpy(&f, &x, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned x; std::memcpy(&x, &f, 4); return x; }
"""
_HALF = {
    'float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x)); return f;': (
        "_Float16 h; std::memcpy(&h, &x, 2); return h;"
    ),
    'u16 x; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x) : "f"(f)); return x;': (
        "_Float16 h = f; u16 x; std::memcpy(&x, &h, 2); return x;"
    ),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    parts = [_DEVICE]
    for number, (dtype, op) in enumerate(CASES):
        source = fold_source(dtype, op).replace(
            "template <class T> __device__", "template <class T>"
        )
        for device, host in _HALF.items():
            assert device in source
            source = source.replace(device, host)
        source = source.replace(" fold_vectors(", f" fold_vectors_{number}(")
        source = source.replace(" fold_elements(", f" fold_elements_{number}(")
        parts.append(f"namespace kernel_{number} {{ {source} }}")
    (folder / "kernels.cc").write_text("\n".join(parts))
    command = ["g++", "-std=c++20", "-O0", "-w", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([*command, "kernels.cc", "-o", "kernels.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernels.so"))


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

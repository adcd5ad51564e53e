"""The reduction of any number of arrays on a CUDA device, in one pass over memory.

NVRTC, which torch brings along, compiles the kernel for an element type and a reduction. The
results are those of `unisono.execution.fold`.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Final

from unisono.errors import UnsupportedError
from unisono.torch_backend.device.cuda_driver import CudaDriver
from unisono.torch_backend.private import hide_from_dynamo
from unisono.types import DType, ReduceOp

MOST_ARRAYS: Final = 64
"""Largest number of sources, and of targets, of one launch."""

_THREADS = 512
_VECTOR_BYTES = 16
_COMPILE = "compile a reduction"

# storage type, accumulator, and the conversions between them
_TYPES: Final[dict[DType, tuple[str, str, str, str]]] = {
    DType.FLOAT32: ("float", "float", "x", "a"),
    DType.FLOAT64: ("double", "double", "x", "a"),
    DType.FLOAT16: ("u16", "float", "from_half(x)", "to_half(a)"),
    DType.BFLOAT16: ("u16", "float", "__uint_as_float((u32)x << 16)", "to_small<8, 7, true>(a)"),
    DType.FLOAT8_E4M3FN: ("u8", "float", "from_small<4, 3, false>(x)", "to_small<4, 3, false>(a)"),
    DType.FLOAT8_E5M2: ("u8", "float", "from_small<5, 2, true>(x)", "to_small<5, 2, true>(a)"),
    DType.INT8: ("signed char", "signed char", "x", "a"),
    DType.UINT8: ("u8", "u8", "x", "a"),
    DType.INT16: ("short", "short", "x", "a"),
    DType.UINT16: ("u16", "u16", "x", "a"),
    DType.INT32: ("int", "int", "x", "a"),
    DType.UINT32: ("u32", "u32", "x", "a"),
    DType.INT64: ("long long", "long long", "x", "a"),
    DType.UINT64: ("u64", "u64", "x", "a"),
    DType.BOOL: ("u8", "u8", "(u8)(x != 0)", "a"),
    DType.COMPLEX64: ("Complex<float>", "Complex<float>", "x", "a"),
    DType.COMPLEX128: ("Complex<double>", "Complex<double>", "x", "a"),
}

_COMBINE: Final[dict[ReduceOp, str]] = {
    ReduceOp.SUM: "a + b",
    ReduceOp.AVG: "a + b",
    ReduceOp.PREMUL_SUM: "a + b",
    ReduceOp.PROD: "a * b",
    ReduceOp.MIN: "(a != a || a < b) ? a : b",
    ReduceOp.MAX: "(a != a || a > b) ? a : b",
    ReduceOp.BAND: "a & b",
    ReduceOp.BOR: "a | b",
    ReduceOp.BXOR: "a ^ b",
}
_COMBINE_BOOL: Final[dict[ReduceOp, str]] = {
    ReduceOp.SUM: "a | b",
    ReduceOp.MAX: "a | b",
    ReduceOp.BOR: "a | b",
    ReduceOp.PROD: "a & b",
    ReduceOp.MIN: "a & b",
    ReduceOp.BAND: "a & b",
    ReduceOp.BXOR: "a ^ b",
}

_SOURCE = r"""
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32;
typedef unsigned long long u64;
template <class T> struct Complex { T r, i; };
template <class T> __device__ Complex<T> operator+(Complex<T> a, Complex<T> b)
{ return {a.r + b.r, a.i + b.i}; }
template <class T> __device__ Complex<T> operator*(Complex<T> a, Complex<T> b)
{ return {a.r * b.r - a.i * b.i, a.r * b.i + a.i * b.r}; }
template <class T> __device__ Complex<T> operator/(Complex<T> a, int n)
{ return {a.r / n, a.i / n}; }

__device__ float from_half(u16 x)
{ float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x)); return f; }
__device__ u16 to_half(float f)
{ u16 x; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x) : "f"(f)); return x; }

// Small floats with E exponent and M mantissa bits. INF: the format has infinities. If not, its
// largest code is NaN.
template <int E, int M, bool INF> __device__ float from_small(u32 x)
{
  const int bias = (1 << (E - 1)) - 1;
  u32 sign = x >> (E + M), exponent = x >> M & ((1 << E) - 1), mantissa = x & ((1 << M) - 1);
  float value;
  if (exponent == (1 << E) - 1 && (INF || mantissa == (1 << M) - 1))
    value = mantissa ? __uint_as_float(0x7fc00000) : __uint_as_float(0x7f800000);
  else if (exponent == 0)
    value = ldexpf((float)mantissa, 1 - bias - M);
  else
    value = ldexpf((float)(mantissa | 1 << M), (int)exponent - bias - M);
  return sign ? -value : value;
}
template <int E, int M, bool INF> __device__ u32 to_small(float f)
{
  const int bias = (1 << (E - 1)) - 1;
  u32 bits = __float_as_uint(f), sign = bits >> 31 << (E + M), magnitude = bits & 0x7fffffff;
  const u32 infinity = ((1 << E) - 1) << M;
  const u32 nan = INF ? infinity | 1 << (M - 1) : infinity | ((1 << M) - 1);
  if (magnitude > 0x7f800000) return E == 8 ? 0x7fc0 : E + M == 7 && INF ? 0x7f : nan;
  int exponent = (int)(magnitude >> 23) - 127 + bias;
  u32 found;
  if (exponent <= 0) {  // the result is subnormal: round a multiple of the smallest number
    float scaled = ldexpf(__uint_as_float(magnitude), bias - 1 + M);
    found = (u32)rintf(scaled);
  } else {
    u32 shift = 23 - M, kept = magnitude >> shift & 1;
    u32 rounded = magnitude + ((1u << (shift - 1)) - 1) + kept;
    found = (rounded >> shift) - ((127 - bias) << M);
  }
  u32 most = INF ? infinity : nan - 1;  // the largest number, without infinities
  if (magnitude == 0x7f800000 || found > most) found = most;
  return sign | found;
}

struct Arrays { const void *source[64]; void *target[64]; int sources, targets; };
typedef @STORED@ Stored;
typedef @WIDE@ Wide;
__device__ Wide load(Stored x) { return @LOAD@; }
__device__ Stored store(Wide a) { return (Stored)(@STORE@); }
__device__ Wide combine(Wide a, Wide b) { return @COMBINE@; }
struct alignas(16) Vector { Stored x[16 / sizeof(Stored)]; };

template <class V> __device__ void run(const Arrays &arrays, u64 count, int divisor)
{
  const int per = sizeof(V) / sizeof(Stored);
  u64 stride = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
    alignas(V) Stored first[per];
    *(V *)first = ((const V *)arrays.source[0])[i];
    if (arrays.sources > 1) {
      Wide sum[per];
      for (int k = 0; k < per; ++k) sum[k] = load(first[k]);
      for (int s = 1; s < arrays.sources; ++s) {
        alignas(V) Stored next[per];
        *(V *)next = ((const V *)arrays.source[s])[i];
        for (int k = 0; k < per; ++k) sum[k] = combine(sum[k], load(next[k]));
      }
      for (int k = 0; k < per; ++k) first[k] = store(@DIVIDE@);
    }
    for (int t = 0; t < arrays.targets; ++t) ((V *)arrays.target[t])[i] = *(V *)first;
  }
}
extern "C" __global__ void fold_vectors(const Arrays arrays, u64 count, int divisor)
{ run<Vector>(arrays, count, divisor); }
extern "C" __global__ void fold_elements(const Arrays arrays, u64 count, int divisor)
{ run<Stored>(arrays, count, divisor); }
"""


class _Arrays(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_uint64 * MOST_ARRAYS),
        ("target", ctypes.c_uint64 * MOST_ARRAYS),
        ("sources", ctypes.c_int),
        ("targets", ctypes.c_int),
    )


def fold_source(dtype: DType, op: ReduceOp) -> str:
    """Returns the CUDA C++ source of the kernels for an element type and a reduction."""
    stored, wide, load, store = _TYPES[dtype]
    combine = (_COMBINE_BOOL if dtype is DType.BOOL else _COMBINE).get(op)
    if combine is None or not dtype.supports(op):
        raise UnsupportedError(
            f"{dtype.name.lower()} elements on a device cannot be reduced by {op.name.lower()}"
        )
    if dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX):
        combine = "a"
    if dtype.is_narrow_float and op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        combine = "a"
    cast = combine if dtype.is_complex else f"(Wide)({combine})"
    divide = "sum[k]"
    if op is ReduceOp.AVG:
        divide = "(Wide)(sum[k] / (Wide)divisor)" if not dtype.is_complex else "sum[k] / divisor"
    return (
        _SOURCE.replace("@STORED@", stored)
        .replace("@WIDE@", wide)
        .replace("@LOAD@", load)
        .replace("@STORE@", store)
        .replace("@COMBINE@", cast)
        .replace("@DIVIDE@", divide)
    )


class FoldKernels:
    """The compiled kernels of one device."""

    def __init__(self, driver: CudaDriver, architecture: str, processors: int) -> None:
        """`processors`: the number of the device's multiprocessors."""
        self._driver = driver
        self._architecture = f"--gpu-architecture={architecture}"
        self._blocks = 4 * processors
        self._kernels: dict[tuple[DType, ReduceOp], tuple[int, ...]] = {}

    def prepare(
        self,
        targets: Sequence[int],
        sources: Sequence[int],
        nbytes: int,
        dtype: DType,
        op: ReduceOp,
        divisor: int,
    ) -> Callable[[int], None]:
        """Prepares a fold of arrays of `nbytes`. The result takes the stream. Addresses are
        integers."""
        vectors, elements = self._kernel(dtype, op)
        aligned = not any(each % _VECTOR_BYTES for each in (*targets, *sources))
        whole = nbytes // _VECTOR_BYTES * _VECTOR_BYTES if aligned else 0
        parts = ((vectors, 0, whole, _VECTOR_BYTES), (elements, whole, nbytes, dtype.size_bytes))
        launches = [
            self._launch(kernel, targets, sources, first, (end - first) // size, divisor)
            for kernel, first, end, size in parts
            if first != end
        ]
        if len(launches) == 1:
            return launches[0]

        def launch(stream: int) -> None:
            for each in launches:
                each(stream)

        return launch

    def _launch(
        self,
        kernel: int,
        targets: Sequence[int],
        sources: Sequence[int],
        first: int,
        count: int,
        divisor: int,
    ) -> Callable[[int], None]:
        arrays = _Arrays(sources=len(sources), targets=len(targets))
        arrays.source[: len(sources)] = [each + first for each in sources]
        arrays.target[: len(targets)] = [each + first for each in targets]
        arguments = arrays, ctypes.c_uint64(count), ctypes.c_int(divisor)
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(each) for each in arguments))
        blocks, enqueue = min(-(-count // _THREADS), self._blocks), self._driver.launch

        def launch(stream: int, keep: object = arguments) -> None:
            enqueue(kernel, blocks, _THREADS, pointers, stream)

        return launch

    def _kernel(self, dtype: DType, op: ReduceOp) -> tuple[int, ...]:
        found = self._kernels.get((dtype, op))
        if found is None:
            image = compiled(fold_source(dtype, op), self._architecture)
            found = self._driver.functions(image, (b"fold_vectors", b"fold_elements"))
            self._kernels[dtype, op] = found
        return found


def require_compiler() -> None:
    """Raises `UnsupportedError` if NVRTC cannot be loaded."""
    try:
        checked(_nvrtc().nvrtcVersion(), "find the compiler of reductions")
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(f"NVRTC is missing: {error}") from error


def compiled(source: str, architecture: str) -> bytes:
    """Compiles CUDA C++ to a binary for an architecture. Raises `UnsupportedError` with the
    compiler's text."""
    nvrtc = _nvrtc()
    created = nvrtc.nvrtcCreateProgram(source.encode(), b"fold.cu", 0, [], [])
    (program,) = checked(created, _COMPILE)
    options = [architecture.encode(), b"--fmad=false"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        (size,) = checked(nvrtc.nvrtcGetProgramLogSize(program), _COMPILE)
        log = bytes(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise UnsupportedError(f"the reduction kernel does not compile: {log.decode()}")
    (size,) = checked(nvrtc.nvrtcGetCUBINSize(program), _COMPILE)
    image = bytes(size)
    checked(nvrtc.nvrtcGetCUBIN(program, image), _COMPILE)
    return image


def checked(result: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """Returns the results of a call of `cuda.bindings`, without its status.

    Raises `UnsupportedError` with the name of a failure. `what`: a verb and an object, for the
    error's text.

    >>> checked((0, 7), "count devices")
    (7,)
    """
    status, *found = result
    if int(status) != 0:
        raise UnsupportedError(f"cannot {what}: CUDA reports {status.name}")
    return tuple(found)


def _nvrtc() -> Any:
    return importlib.import_module("cuda.bindings.nvrtc")


hide_from_dynamo(FoldKernels)

"""The reduction kernels of CUDA devices, compiled for the CPU."""

from __future__ import annotations

import hashlib
import os
import subprocess

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


def for_cpu(source):
    """Returns the text of a kernel for a compiler of the CPU; `with_device` goes before it."""
    source = source.replace("template <class T> __device__", "template <class T>")
    for device, host in _HALF.items():
        assert device in source
        source = source.replace(device, host)
    return source


def with_device(text):
    """Returns text after the definitions that kernels need."""
    return _DEVICE + text


def build(text, folder, *options):
    """Compiles C++ to a library in a folder, unless another process has; returns its path."""
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    library = folder / f"{name}.so"
    if not library.exists():
        part = folder / f"{name}-{os.getpid()}"
        source = part.with_suffix(".cc")
        source.write_text(text)
        command = ["g++", "-std=c++20", "-O0", "-w", "-ffp-contract=off", "-shared", "-fPIC"]
        subprocess.run([*command, *options, str(source), "-o", str(part)], check=True)
        part.rename(library)
    return library

"""Measures the cost of 16- and 8-bit floats in reductions.

The program compares a plain sum with a sum of scaled contributions (`premul_sum`) and a sum by the
ring algorithm, for the same array.

    python benchmarks/low_precision_reductions.py [ranks]

The program prints microseconds, the median of 50 calls on the slowest rank. The following command
measures the kernels alone, in GB/s, and compares them with memcpy: `make cpp &&
build/cpp/csrc/tests/bench_kernels`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch

import unisono

REPEATS = 50
KINDS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32)


def median_us(call: Callable[[], object]) -> float:
    """Returns the median time of a call in microseconds."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def measure() -> list[tuple[str, float]]:
    """Returns rows of name and microseconds, the maximum over all ranks."""
    rows = []
    with unisono.init() as comm:
        for kind in KINDS:
            x = torch.zeros((512 << 10) // kind.itemsize).to(kind)
            calls: dict[str, Callable[[], object]] = {
                "sum": lambda x=x: comm.all_reduce(x),
                "premul_sum": lambda x=x: comm.all_reduce(x, unisono.premul_sum(0.5)),
                "sum by ring": lambda x=x: comm.all_reduce(x, algorithm="ring"),
            }
            for name, call in calls.items():
                call()
                mine = np.array([median_us(call)])
                rows.append((f"{kind} {name}", float(comm.all_reduce(mine, "max")[0])))
    return rows


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    for name, time_us in unisono.run(measure, ranks=ranks)[0]:
        print(f"{name:32} {time_us:9.0f} us")

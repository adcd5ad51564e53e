"""Executors of execution plans.

`NativeExecutor` loads plans into the C++ core. `reference` interprets plans in Python, one rank
after another; the native executor must match it bit for bit.
"""

from unisono.execution.narrow_floats import narrowed
from unisono.execution.native_executor import (
    OP_CODES,
    UNKNOWN_COUNT,
    Arguments,
    LoadedPlan,
    NativeExecutor,
)

__all__ = ["OP_CODES", "UNKNOWN_COUNT", "Arguments", "LoadedPlan", "NativeExecutor", "narrowed"]

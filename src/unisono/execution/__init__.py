"""Execution: what runs an execution plan.

`NativeExecutor` loads plans into the C++ core. `reference` interprets them in Python, one rank
after another, and is what the native executor must match bit for bit.
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

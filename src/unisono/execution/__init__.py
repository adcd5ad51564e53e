"""Executors of execution plans.

`NativeExecutor` loads plans into the C++ core. `reference` interprets plans in Python, one rank
after another; the native executor must match it bit for bit. `moves_of` turns a schedule into moves
between memories that one rank can access directly, such as those of ranks on one GPU.
"""

from unisono.execution.narrow_floats import narrowed
from unisono.execution.native_executor import (
    OP_CODES,
    UNKNOWN_COUNT,
    Arguments,
    Form,
    LoadedPlan,
    NativeExecutor,
)
from unisono.execution.peer_moves import Move, Place, moves_of
from unisono.execution.reference import part_bytes

__all__ = [
    "OP_CODES",
    "UNKNOWN_COUNT",
    "Arguments",
    "Form",
    "LoadedPlan",
    "Move",
    "NativeExecutor",
    "Place",
    "moves_of",
    "narrowed",
    "part_bytes",
]

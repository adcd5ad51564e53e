"""Spans in the traces of torch's profiler, stacks, and the names of element types in records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch._C import _distributed_c10d
from torch._C import _profiler as _torch_profiler

# Typed as Any: the stubs lack some of these names.
_c10d: Any = _distributed_c10d
_profiler: Any = _torch_profiler

is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Returns True if torch's profiler records this thread; takes 40 ns."""

# Before torch 2.13 programs cannot name their calls.
_named_by_program: Callable[[], str] = getattr(_c10d, "_get_comm_profiling_name", str)

DTYPE_NAMES: Final = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.bool: "Bool",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
"""The C++ names of element types, which the flight recorder writes."""


def span(name: str, tensors: list[torch.Tensor], details: dict[str, Any]) -> Any:
    """Returns a context manager that adds a span to the profiler's trace, with shapes and details.

    `dist.record_comm` overrides the name.
    """
    return _profiler._RecordFunctionFast(_named_by_program() or name, tensors, details)


def current_stack() -> Any:
    """Returns the program's current stack, without symbols; takes 1 us."""
    return _profiler.gather_traceback(True, False, False)


def readable_stacks(stacks: list[Any]) -> list[list[dict[str, Any]]]:
    """Returns the function name, file and line of each frame of each stack, innermost frame
    first.
    """
    found: list[list[dict[str, Any]]] = _profiler.symbolize_tracebacks(stacks) if stacks else []
    return found

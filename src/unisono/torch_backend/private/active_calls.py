"""Calls of torch's Python functions that are active in this thread."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

from torch import distributed as dist


def call_under_way(function: Any) -> FrameType | None:
    """Returns the frame of the innermost active call of a function in this thread."""
    code = inspect.unwrap(function).__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def is_called_by(function: Any) -> bool:
    """Returns True if a call of a Python function is active in this thread."""
    return call_under_way(function) is not None


def batch_under_way() -> tuple[object, list[Any]] | None:
    """Returns the active call of `dist.batch_isend_irecv` and its operations, else None."""
    call = call_under_way(dist.batch_isend_irecv)
    return None if call is None else (call, call.f_locals["p2p_op_list"])

"""The handle of the current CUDA stream. The private name is not in `names.py`, since a torch
without CUDA lacks it."""

from __future__ import annotations

from typing import Any

import torch

_current_handle: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream_handle(device: int) -> int:
    """Returns the handle of a CUDA device's current stream; cheap, without an object of torch."""
    if _current_handle is not None:
        return int(_current_handle(device))
    return int(torch.cuda.current_stream(device).cuda_stream)

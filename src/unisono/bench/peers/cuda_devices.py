"""The GPUs of this machine, for ranks that may share them."""

from __future__ import annotations

import torch

from unisono.errors import UnsupportedError


def require_gpu() -> None:
    """Raises `UnsupportedError` if torch finds no GPU."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = "has no CUDA" if built is None else f"for CUDA {built} finds no GPU"
        raise UnsupportedError(f"--device cuda: torch {torch.__version__} {reason}")


def select_gpu(rank: int) -> None:
    """Selects the GPU of a rank. If there are fewer GPUs than ranks, ranks share them."""
    require_gpu()
    torch.cuda.set_device(rank % torch.cuda.device_count())

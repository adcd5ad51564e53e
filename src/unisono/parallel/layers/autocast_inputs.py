"""Inputs of products that are written without torch's autocast."""

from __future__ import annotations

import torch

_DEVICE = "cpu"


def autocast_input(x: torch.Tensor) -> torch.Tensor:
    """Returns x in the type in which autocast multiplies matrices; x itself without autocast."""
    if not torch.is_autocast_enabled(_DEVICE) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(_DEVICE))

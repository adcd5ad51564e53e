"""Refusals of layouts that need a newer torch."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

from unisono.errors import UnsupportedError
from unisono.planner import Layout

_NEEDED = "2.13"


def check_torch(layout: Layout) -> None:
    """Raises `UnsupportedError` if a layout needs a newer torch.

    Older pipeline schedules run the passes of a stage in another way, and older versions of
    `fully_shard` do not sum the gradients of parameters that only some ranks have used.
    """
    if layout.pp > 1:
        need_torch(f"pp = {layout.pp}", "pp = 1")
    if layout.zero > 1:
        need_torch(f"zero = {layout.zero}", "zero = 1")


def need_torch(what: str, other: str) -> None:
    """Raises `UnsupportedError` that names `other` if torch is too old for `what`."""
    if TorchVersion(torch.__version__) < _NEEDED:
        raise UnsupportedError(
            f"{what} needs torch {_NEEDED} or newer, found torch {torch.__version__}: install it; "
            f"{other} works"
        )

"""Replacement of torch's functions and methods, which the stand-in for Gloo needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import distributed as dist

_torch_groups: Any = dist.distributed_c10d
_REPLACED: Final = "_replaced_by_unisono"


def replace_function(name: str, replacement: Callable[[Any], Any]) -> None:
    """Replaces a function of torch.distributed by `replacement(function)`, once.

    Raises `AttributeError` if this torch has no such function.
    """
    original = getattr(_torch_groups, name)
    changed = _replace(_torch_groups, name, replacement)
    if getattr(dist, name, None) is original:
        setattr(dist, name, changed)


def replace_reading_of_profiles(replacement: Callable[[Any], Any]) -> None:
    """Replaces the method that makes the list of events of a profile, once, if it exists."""
    with contextlib.suppress(AttributeError):
        _replace(torch.autograd.profiler.profile, "_parse_kineto_results", replacement)


def replace_logging_data(replacement: Callable[[Any], Any]) -> None:
    """Replaces the method that returns what DDP says about itself, once, if it exists."""
    with contextlib.suppress(AttributeError):
        _replace(torch.nn.parallel.DistributedDataParallel, "_get_ddp_logging_data", replacement)


def _replace(owner: Any, name: str, replacement: Callable[[Any], Any]) -> Any:
    original = getattr(owner, name)
    if hasattr(original, _REPLACED):
        return original
    changed = replacement(original)
    setattr(changed, _REPLACED, True)
    setattr(owner, name, changed)
    return changed

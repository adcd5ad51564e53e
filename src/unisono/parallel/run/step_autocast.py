"""Autocast of forward passes, as the precision of a run or the caller of a step states it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed as dist

from unisono.errors import UnisonoError
from unisono.parallel.precision import Precision

_DEVICE = "cpu"
_OF_TYPES = re.compile(r"dtype|scalar type|not implemented for '(Half|BFloat16)'")


class StepAutocast:
    """The autocast of each forward pass of a step.

    It is that which the caller of the step has entered. A precision of 16 bits enters it, too: it
    converts what meets the copies of weights in another type, and computes losses in float32.

    One autocast around all passes would keep the converted weights of the first microbatch for the
    others: their gradients would be lost, or come from weights that ZeRO has freed. So forward
    passes convert weights anew, and backward passes run without autocast, as torch recommends.
    """

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._given: torch.dtype | None = None
        self.dtype: torch.dtype | None = None
        """The type to which autocast converts; None without autocast."""

    def enter_step(self) -> AbstractContextManager[None]:
        """Notes the caller's autocast; returns a context of the step, without autocast."""
        is_enabled = torch.is_autocast_enabled(_DEVICE)
        self._given = torch.get_autocast_dtype(_DEVICE) if is_enabled else None
        own = self._precision.computation_type if self._precision.is_narrow else None
        self.dtype = own or self._given
        return torch.autocast(_DEVICE, enabled=False) if is_enabled else nullcontext()

    def require_one(self) -> None:
        """Raises `ValueError` if the caller's autocast and the precision of the run differ."""
        computation = self._precision.computation_type
        if self._given is not None and computation not in (None, self._given):
            raise ValueError(
                f"torch.autocast converts to {self._given}, but the precision of this run computes "
                f"in {computation}; expected one of them: call step without autocast"
            )

    def forward(self) -> AbstractContextManager[None]:
        """Returns a context for a forward pass and its loss."""
        own = self._precision.computation_type
        if self.dtype is None:
            return nullcontext() if own is None else _explaining(own)
        autocast = torch.autocast(_DEVICE, dtype=self.dtype, cache_enabled=False)
        return autocast if own is None else _explaining(own, autocast)

    def leave_step(self) -> None:
        """Forgets converted weights that the caller's own passes have kept: they are outdated."""
        if self._given is not None:
            torch.clear_autocast_cache()


@contextmanager
def _explaining(
    dtype: torch.dtype, inner: AbstractContextManager[Any] | None = None
) -> Iterator[None]:
    """Raises `ValueError` in one line if a model cannot compute in a type."""
    try:
        with inner or nullcontext():
            yield
    except RuntimeError as error:
        if isinstance(error, UnisonoError | dist.DistError) or not _OF_TYPES.search(str(error)):
            raise
        raise ValueError(
            f"precision: the model cannot compute in {dtype}: {' '.join(str(error).split())}; "
            "expected functions that torch has for this type, and tensors of the type of the "
            "weights, such as x.to(self.weight.dtype)"
        ) from error

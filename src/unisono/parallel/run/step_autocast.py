"""Autocast of forward passes in a step that its caller runs under `torch.autocast`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_DEVICE = "cpu"


class StepAutocast:
    """The autocast that the caller of a step has entered, for each forward pass of the step.

    One autocast around all passes would keep the converted weights of the first microbatch for the
    others: their gradients would be lost, or come from weights that ZeRO has freed. So forward
    passes convert weights anew, and backward passes run without autocast, as torch recommends.
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        """The type to which autocast converts; None without autocast."""

    def enter_step(self) -> AbstractContextManager[None]:
        """Notes the caller's autocast; returns a context of the step, without autocast."""
        is_enabled = torch.is_autocast_enabled(_DEVICE)
        self.dtype = torch.get_autocast_dtype(_DEVICE) if is_enabled else None
        return torch.autocast(_DEVICE, enabled=False) if is_enabled else nullcontext()

    def forward(self) -> AbstractContextManager[None]:
        """Returns a context for a forward pass and its loss."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(_DEVICE, dtype=self.dtype, cache_enabled=False)

    def leave_step(self) -> None:
        """Forgets converted weights that the caller's own passes have kept: they are outdated."""
        if self.dtype is not None:
            torch.clear_autocast_cache()

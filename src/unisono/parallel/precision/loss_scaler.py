"""The factor of losses by which gradients of float16 keep small values."""

from __future__ import annotations

import math
from collections.abc import Mapping

from unisono.parallel.precision.precision import Precision

_GROWTH, _BACKOFF = 2.0, 0.5


class LossScaler:
    """Scales losses, and decides on all ranks alike whether a step may change the weights.

    The rules and numbers are those of torch's `GradScaler`: a gradient that is infinite or NaN on
    any rank halves the factor, and the step changes nothing; after `growth_interval` consecutive
    other steps the factor is doubled. Without float16, the factor is 1 and no step is skipped.

    >>> import torch
    >>> scaler = LossScaler(Precision(computation=torch.float16, growth_interval=2))
    >>> [scaler.accepts(norm) for norm in (math.inf, 1.0, 1.0)], scaler.factor, scaler.skipped
    ([False, True, True], 65536.0, 1)
    """

    def __init__(self, precision: Precision) -> None:
        self._is_active = precision.scales_losses
        self._interval = precision.growth_interval
        self.factor = float(precision.init_scale) if self._is_active else 1.0
        """The factor of the next step's losses."""
        self._good_steps = 0
        self.skipped = 0
        """Number of steps that changed no weights, because a gradient was infinite or NaN."""

    def accepts(self, norm: float) -> bool:
        """Returns True if a step may change the weights, and chooses the factor of the next step.

        `norm`: that of all gradients of all ranks, so that all ranks decide alike.
        """
        if not self._is_active:
            return True
        if not math.isfinite(norm):
            self.factor *= _BACKOFF
            self._good_steps = 0
            self.skipped += 1
            return False
        self._good_steps += 1
        if self._good_steps >= self._interval:
            self.factor = min(self.factor * _GROWTH, 2.0**127)  # a float32 has no larger power
            self._good_steps = 0
        return True

    def state(self) -> dict[str, float]:
        """Returns what a checkpoint keeps; empty without float16."""
        if not self._is_active:
            return {}
        return {
            "factor": self.factor, "good_steps": self._good_steps, "skipped": self.skipped,
        }  # fmt: skip

    def load(self, state: Mapping[str, float]) -> None:
        """Goes on from the state of a checkpoint; an empty one, of another precision, changes
        nothing."""
        if self._is_active and state:
            self.factor = float(state["factor"])
            self._good_steps, self.skipped = int(state["good_steps"]), int(state["skipped"])

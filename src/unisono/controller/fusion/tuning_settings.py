"""The settings of the fusion tuner: lengths of trials, and the decision rule."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningSettings:
    """Lengths of the trials, in steps, and the decision rule."""

    warm_up: int = 4
    """Number of warm-up steps with each plan, at the start of the first trial and of the
    comparison. Their times are not used."""
    measured: int = 16
    """Number of steps in which the times of tensors and buckets are measured."""
    pairs: int = 16
    """Maximum number of pairs of blocks in the comparison."""
    trial_pairs: int = 4
    """Number of pairs in one trial. The comparison may end early after each trial."""
    block: int = 3
    """Number of steps in a block. The time of the first step is not used, because the buckets
    change in it."""
    faster_pairs: int = 13
    """Minimum number of pairs that must be faster with the new buckets."""
    least_gain: float = 0.01
    """Minimum fraction of the step time that the new buckets must save."""
    most_residual: float = 0.5
    """Largest median relative error of an accepted fit."""

    def __post_init__(self) -> None:
        for name, least in (
            ("warm_up", 0),
            ("measured", 2),
            ("pairs", 1),
            ("trial_pairs", 1),
            ("block", 2),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected {least} or more, got {getattr(self, name)}")
        if not 1 <= self.faster_pairs <= self.pairs:
            raise ValueError(
                f"faster_pairs: expected 1 to {self.pairs}, the pairs, got {self.faster_pairs}"
            )

    @property
    def error_rate(self) -> float:
        """Upper bound of the probability that buckets are replaced by buckets that are not better.

        >>> round(TuningSettings().error_rate, 4)
        0.0106
        """
        wins = range(self.faster_pairs, self.pairs + 1)
        return sum(math.comb(self.pairs, k) for k in wins) / float(2**self.pairs)

    @property
    def most_steps(self) -> int:
        """Maximum number of steps of all trials.

        >>> TuningSettings().most_steps
        133
        """
        # Each trial ends with one more step, whose time is not measured.
        trials = 1 + math.ceil(self.pairs / self.trial_pairs)
        return 4 * self.warm_up + self.measured + 2 * self.pairs * self.block + trials

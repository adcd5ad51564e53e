"""The report of the fusion tuner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionReport:
    """Results and decision of the fusion tuner. Times are those of the slowest rank.

    In names, `before` means the plan with the buckets that `fusion_bytes` gives, and `after` means
    the plan with the buckets that the tuner computed. A value that was not found is None.
    """

    replaced: bool
    """True if the plan now has the buckets that the tuner computed, not those that `fusion_bytes`
    gives."""
    reason: str
    """The reason why the buckets were replaced or not."""
    buckets: tuple[tuple[str, ...], ...]
    """The names of the tensors in each bucket of the plan, in the order of the buckets."""
    bucket_bytes: tuple[int, ...]
    """Bytes of each bucket of the plan."""
    before_bucket_bytes: tuple[int, ...]
    """Bytes of each bucket that `fusion_bytes` gives."""
    alpha_s: float | None = None
    """Fitted latency of a collective, in seconds."""
    beta_s_per_byte: float | None = None
    """Fitted time of a collective per byte, in seconds."""
    r2: float | None = None
    """Fraction of the variance of bucket times that the fit explains."""
    residual: float | None = None
    """Median relative error of the fit."""
    predicted_before_s: float | None = None
    """Predicted seconds from the first tensor of a step to the end of its last bucket, with the old
    plan."""
    predicted_after_s: float | None = None
    measured_before_s: float | None = None
    """Median seconds of a step with the old plan, measured in the comparison of both plans."""
    measured_after_s: float | None = None
    gain: float | None = None
    """Fraction of the step time that the new plan saves: the median over pairs of blocks of steps.
    In each pair, one block has the old plan and one has the new plan."""
    faster_pairs: int = 0
    """Number of pairs of blocks in which the new plan was faster than the old plan."""
    pairs: int = 0
    steps_used: int = 0
    """Number of steps from the first measured step to the decision."""

    def __str__(self) -> str:
        now = f"{len(self.bucket_bytes)} buckets instead of {len(self.before_bucket_bytes)}"
        text = f"{now if self.replaced else 'buckets unchanged'}: {self.reason}"
        if self.alpha_s is not None and self.beta_s_per_byte is not None:
            text += f"; alpha {self.alpha_s * 1e6:.1f} us, beta {self.beta_s_per_byte * 1e9:.4f} ns"
        if self.measured_before_s is not None and self.measured_after_s is not None:
            before, after = self.measured_before_s * 1e3, self.measured_after_s * 1e3
            text += f"; step {before:.3f} ms before, {after:.3f} ms after"
        return f"{text}; {self.steps_used} steps used"

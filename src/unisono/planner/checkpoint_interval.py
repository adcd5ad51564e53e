"""The interval between checkpoints, and the share of time that makes progress under failures."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, sqrt

from unisono.planner.positive_values import require_positive
from unisono.planner.prediction import Prediction

FAILURES_PER_DEVICE_HOUR = 419 / (54 * 24 * 16384)
"""Unexpected interruptions of Llama 3's training: 419 in 54 days on 16,384 H100 (arXiv 2407.21783,
section 3.3.4). This is one failure per 51,000 device hours."""
STORAGE_BPS_PER_HOST = 2e9
"""Default rate at which a host writes a checkpoint: 16 Gbit/s."""
RESTART_S = 600.0
"""Default seconds from a failure to the next step: detection, start and loading."""
_CHECKPOINT_BYTES = 14
"""Bytes of a parameter in a checkpoint: 16-bit weight, float32 weight, two moments."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """The best interval between checkpoints, and the cost of failures."""

    checkpoint_bytes: float
    checkpoint_s: float
    """Seconds to write a checkpoint. Training waits during this time."""
    failure_s: float
    """Mean seconds between failures of the whole run."""
    interval_s: float
    """Training seconds between checkpoints (Daly)."""
    steps: int
    """Number of steps between checkpoints."""
    goodput: float
    """Share of the time that makes progress."""


def checkpoint_plan(
    prediction: Prediction,
    *,
    failures_per_device_hour: float = FAILURES_PER_DEVICE_HOUR,
    storage_Bps: float | None = None,
    restart_s: float = RESTART_S,
) -> CheckpointPlan:
    """Returns the interval between checkpoints with which a run makes most progress.

    `storage_Bps` is the rate of all hosts together. None means 2 GB/s for each host. Raises
    ValueError for values that are not positive.

    >>> from unisono import planner
    >>> step = planner.predict(
    ...     planner.load_model("llama3-405b"),
    ...     planner.Cluster.parse("h100:16384"),
    ...     planner.Layout(dp=128, tp=8, pp=16, sequence_parallel=True, zero=1),
    ...     planner.Workload(seq=8192, global_batch=2048, micro_batch=1),
    ... )
    >>> plan = planner.checkpoint_plan(step)
    >>> round(plan.failure_s / 3600, 1), plan.interval_s < plan.failure_s, 0.7 < plan.goodput < 1
    (3.1, True, True)
    """
    cluster = prediction.cluster
    rate = cluster.hosts * STORAGE_BPS_PER_HOST if storage_Bps is None else storage_Bps
    require_positive({"failures_per_device_hour": failures_per_device_hour, "storage_Bps": rate})
    nbytes = _CHECKPOINT_BYTES * prediction.model.parameters
    checkpoint_s = nbytes / rate
    failure_s = 3600 / (failures_per_device_hour * cluster.devices)
    interval_s = daly_interval_s(checkpoint_s, failure_s)
    steps = max(round(interval_s / prediction.step_s), 1)
    return CheckpointPlan(
        checkpoint_bytes=nbytes,
        checkpoint_s=checkpoint_s,
        failure_s=failure_s,
        interval_s=interval_s,
        steps=steps,
        goodput=goodput(
            steps * prediction.step_s,
            checkpoint_s=checkpoint_s,
            failure_s=failure_s,
            restart_s=restart_s,
        ),
    )


def young_interval_s(checkpoint_s: float, failure_s: float) -> float:
    """Returns sqrt(2 x checkpoint x failure time): the first-order best interval (Young, 1974).

    >>> round(young_interval_s(60, 86400))
    3220
    """
    return sqrt(2 * checkpoint_s * failure_s)


def daly_interval_s(checkpoint_s: float, failure_s: float) -> float:
    """Returns Daly's higher-order estimate of the best interval (doi 10.1016/j.future.2004.11.016).

    `failure_s` is the mean time between failures. Raises ValueError for values that are not
    positive.

    >>> 3150 < daly_interval_s(60, 86400) < 3220
    True
    """
    if not (checkpoint_s > 0 and failure_s > 0):
        raise ValueError(
            f"checkpoint_s and failure_s must be positive, not {checkpoint_s} and {failure_s}"
        )
    if checkpoint_s >= 2 * failure_s:
        return failure_s
    ratio = checkpoint_s / (2 * failure_s)
    series = 1 + sqrt(ratio) / 3 + ratio / 9
    return young_interval_s(checkpoint_s, failure_s) * series - checkpoint_s


def goodput(interval_s: float, *, checkpoint_s: float, failure_s: float, restart_s: float) -> float:
    """Returns the share of time that makes progress, for exponential times between failures.

    With failures, a run of T seconds takes M e^(R/M) (e^((t + d)/M) - 1) T / t seconds (Daly,
    equation 20), where M is the mean time between failures, R the restart time, d the checkpoint
    time and t the interval.

    >>> round(goodput(3200, checkpoint_s=60, failure_s=86400, restart_s=600), 3)
    0.957
    """
    growth = failure_s * exp(restart_s / failure_s)
    return interval_s / (growth * expm1((interval_s + checkpoint_s) / failure_s))

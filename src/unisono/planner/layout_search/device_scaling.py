"""The scaling curve: the fastest layout for each number of devices, and the scale factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import Workload
from unisono.planner.layout_search.search import search, smaller_clusters
from unisono.planner.own_measurements.calibration import Calibration
from unisono.planner.prediction import Prediction
from unisono.planner.stated_inputs import (
    require_executor,
    require_workload,
    stated_cluster,
    stated_model,
)

if TYPE_CHECKING:
    from unisono.launch import Executor


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """The fastest layout for one number of devices."""

    devices: int
    prediction: Prediction
    speedup: float
    """Tokens per second, divided by those on the fewest devices."""
    scale_factor: float
    """Tokens per second and device, divided by those on the fewest devices."""


def scaling_curve(
    model: Transformer | str,
    cluster: Cluster | str,
    job: Workload,
    *,
    devices: Sequence[int] | None = None,
    weak: bool = False,
    schedules: Sequence[str] = ("1f1b",),
    executor: Executor | None = None,
    constants: CalibratedConstants | None = None,
    calibration: Calibration | None = None,
) -> tuple[ScalingPoint, ...]:
    """Returns the fastest layout for each number of devices, fewest first.

    `devices` lists the numbers of devices. The default is the cluster and its parts
    (`smaller_clusters`). The batch of a step is the same for all numbers (strong scaling). With
    `weak`, `job` has the batch of the whole cluster, and n devices have n / `cluster.devices` of
    this batch. The curve omits numbers whose batch is not whole, and numbers for which no layout
    fits. Raises ValueError if no layout fits for any number, and for a cluster with a topology,
    which has a fixed number of devices.

    >>> from unisono import planner
    >>> curve = planner.scaling_curve(
    ...     planner.load_model("gpt3-1.7b"),
    ...     planner.Cluster.parse("a100:16"),
    ...     planner.Workload(seq=2048, global_batch=64),
    ... )
    >>> curve[0].scale_factor, curve[-1].devices, curve[-1].scale_factor < 1
    (1.0, 16, True)
    """
    model, cluster = stated_model(model), stated_cluster(cluster)
    require_workload(job)
    require_executor(executor)
    if cluster.topology is not None:
        raise ValueError("a cluster with a topology has one number of devices; leave it out")
    counts = sorted(devices or (each.devices for each in smaller_clusters(cluster)))
    options: dict[str, Any] = {
        "schedules": schedules,
        "executor": executor,
        "constants": constants,
        "calibration": calibration,
    }
    found: list[tuple[int, Prediction]] = []
    reason = ""
    for count in counts:
        batch = job.global_batch * count / cluster.devices if weak else job.global_batch
        if batch != int(batch) or batch < 1:
            continue
        work = replace(job, global_batch=int(batch))
        try:
            best = search(model, replace(cluster, devices=count), work, keep=1, **options)
        except ValueError as error:
            reason = f"; on {count}: {error}"
            continue
        found.append((count, best[0].prediction))
    if not found:
        raise ValueError(f"nothing fits on {', '.join(map(str, counts))} devices{reason}")
    first_count, first = found[0]
    speedups = [each.tokens_per_s / first.tokens_per_s for _, each in found]
    return tuple(
        ScalingPoint(
            devices=count,
            prediction=prediction,
            speedup=speedup,
            scale_factor=speedup * first_count / count,
        )
        for (count, prediction), speedup in zip(found, speedups, strict=True)
    )

"""The Pareto front of layouts in step time, devices, and memory of the fullest device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from unisono.planner.constants.calibrated_constants import CalibratedConstants, default_constants
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import Workload
from unisono.planner.layout_search.parallel_calls import results_of
from unisono.planner.layout_search.search import smaller_clusters
from unisono.planner.layout_search.search_space import (
    LayoutOption,
    OptionRequest,
    layout_options,
    tensor_pipeline_sizes,
)
from unisono.planner.own_measurements.calibration import Calibration
from unisono.planner.prediction import Prediction, prediction_of
from unisono.planner.stated_inputs import (
    require_executor,
    require_workload,
    stated_cluster,
    stated_model,
)

if TYPE_CHECKING:
    from unisono.launch import Executor


class _Point(NamedTuple):
    devices: int
    memory: float
    """Bytes of the fullest device, rounded up to a multiple of the tolerance if there is one."""
    step_s: float
    option: LayoutOption
    kinds: dict[str, float]


def pareto_front(
    model: Transformer | str,
    cluster: Cluster | str,
    job: Workload,
    *,
    tolerance: float = 0.0,
    schedules: Sequence[str] = ("1f1b",),
    executor: Executor | None = None,
    constants: CalibratedConstants | None = None,
    calibration: Calibration | None = None,
) -> tuple[Prediction, ...]:
    """Returns the layouts that are Pareto-optimal in step time, number of devices and memory.

    Considers the cluster and its parts (`smaller_clusters`), with the combinations of `search`. The
    front is exact: a combination is skipped only if its lower bound is over the time of another
    combination that needs no more devices or memory. With `tolerance`, memory is rounded up to
    multiples of this share of the capacity, and a layout is omitted if another layout is slower by
    at most this share and needs no more devices or rounded memory. The result is sorted by devices,
    then by time. Raises ValueError if no layout fits.

    >>> from unisono import planner
    >>> front = planner.pareto_front(
    ...     planner.load_model("gpt3-7.5b"),
    ...     planner.Cluster.parse("a100:16"),
    ...     planner.Workload(seq=2048, global_batch=64),
    ...     tolerance=0.05,
    ... )
    >>> front[0].layout.devices < front[-1].layout.devices
    True
    """
    model, cluster = stated_model(model), stated_cluster(cluster)
    require_workload(job)
    require_executor(executor)
    request = OptionRequest(
        model=model,
        job=job,
        schedules=tuple(schedules),
        constants=constants or default_constants(),
        calibration=calibration,
        headroom=0.0,
    )
    clusters = {each.devices: each for each in smaller_clusters(cluster)}
    one = partial(_front_of, request, tolerance)
    fronts = results_of(one, [(each,) for each in clusters.values()], executor)
    points = _not_beaten([point for front in fronts for point in front], tolerance)
    if not points:
        raise ValueError(f"no layout fits on {cluster.devices} devices; `search` says what lacks")
    runs = {devices: request.run(each) for devices, each in clusters.items()}
    points.sort(key=lambda point: (point.devices, point.step_s))
    return tuple(
        prediction_of(
            runs[point.devices],
            point.option.layout,
            point.option.micro_batch,
            point.option.recompute,
            point.kinds,
        )
        for point in points
    )


def _front_of(request: OptionRequest, tolerance: float, cluster: Cluster) -> list[_Point]:
    """Returns the front for one number of devices, least memory first."""
    run = request.run(cluster)
    sizes = tensor_pipeline_sizes(request.model, cluster)
    options = layout_options(request, run, sizes)
    step_bytes = tolerance * run.capacity_bytes
    fitting = []
    for option in options:
        if option.fits(run, request.headroom):
            nbytes = option.memory_bytes(run)
            memory = ceil(nbytes / step_bytes) * step_bytes if step_bytes else nbytes
            fitting.append((memory, option))
    # The sort is stable, so options of equal memory stay in the order of their bounds.
    fitting.sort(key=lambda each: each[0])
    front: list[_Point] = []
    limit_s = float("inf")
    for memory, option in fitting:
        if option.bound_s >= limit_s:
            continue
        kinds = run.step(option.layout, option.micro_batch, option.recompute)
        step_s = sum(kinds.values())
        if step_s < limit_s:
            if front and front[-1].memory == memory:
                front.pop()
            front.append(_Point(cluster.devices, memory, step_s, option, kinds))
            limit_s = step_s
    return front


def _not_beaten(points: list[_Point], tolerance: float) -> list[_Point]:
    """Returns the points that are not beaten. A point is beaten if another point, with no more
    devices, is at least as good in memory, and in time within the tolerance.
    """
    found: list[_Point] = []
    for point in sorted(points, key=lambda each: each[:3]):
        beaten = any(
            other.devices <= point.devices
            and other.memory <= point.memory
            and other.step_s * (1 - tolerance) <= point.step_s
            for other in found
        )
        if not beaten:
            found.append(point)
    return found

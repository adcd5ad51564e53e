"""The search for the best layout of a recommendation model and the best placement of its tables."""

from __future__ import annotations

from itertools import product

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.workload import Workload
from unisono.planner.own_measurements.calibration import Calibration
from unisono.planner.recommendation.dlrm_prediction import DlrmPrediction, predict_dlrm
from unisono.planner.recommendation.dlrm_shape import Dlrm
from unisono.planner.recommendation.greedy_placement import AUTO
from unisono.planner.recommendation.table_placement import TABLE_KINDS


def search_dlrm(
    model: Dlrm,
    cluster: Cluster,
    job: Workload,
    *,
    objective: str = "time",
    longest_s: float | None = None,
    keep: int = 10,
    table_update: str = "rows",
    constants: CalibratedConstants | None = None,
    calibration: Calibration | None = None,
) -> tuple[DlrmPrediction, ...]:
    """Predicts each kind of placement with ZeRO 0 and 1, and returns the `keep` best that fit.

    `unisono.planner.search` calls this function. Kinds with equal placements count once, under the
    name that is first in ("auto", *TABLE_KINDS). Raises ValueError if no placement fits or is fast
    enough, and for another objective than "time" and "memory".
    """
    if objective not in ("time", "memory"):
        raise ValueError(
            f"objective = {objective} is not searched for recommendation models; time and memory "
            "are"
        )
    found: dict[object, DlrmPrediction] = {}
    stages = (0, 1) if cluster.devices > 1 else (0,)
    for kind, zero in product((AUTO, *TABLE_KINDS), stages):
        layout = Layout(dp=cluster.devices, zero=zero)
        prediction = predict_dlrm(
            model,
            cluster,
            layout,
            job,
            placement=kind,
            table_update=table_update,
            constants=constants,
            calibration=calibration,
        )
        found.setdefault((prediction.placement.tables, zero), prediction)
    fitting = [each for each in found.values() if each.fits]
    if not fitting:
        least = min(found.values(), key=lambda each: each.memory_bytes)
        raise ValueError(
            f"nothing fits: the placement {least.placed_by} needs least, "
            f"{least.memory_bytes / 1e9:.1f} GB, and a device has "
            f"{least.capacity_bytes / 1e9:.1f} GB for training; more devices fit"
        )
    limit_s = float("inf") if longest_s is None else longest_s
    best = [each for each in fitting if each.step_s <= limit_s]
    if not best:
        shortest = min(fitting, key=lambda each: each.step_s)
        raise ValueError(
            f"no step takes {limit_s:.4g} s or less; the shortest takes {shortest.step_s:.4g} s "
            f"({shortest.layout.text()}, placement {shortest.placed_by})"
        )
    best.sort(key=lambda each: each.step_s if objective == "time" else each.memory_bytes)
    return tuple(best[:keep])

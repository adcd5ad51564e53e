"""The smallest change of a layout that makes it fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import RECOMPUTE, Workload
from unisono.planner.memory.zero_states import gradient_bytes
from unisono.planner.own_measurements.calibration import Calibration
from unisono.planner.prediction import Prediction, predict


@dataclass(frozen=True, kw_only=True)
class MemoryChange:
    """Changes that make a layout fit in memory, and the prediction with these changes."""

    text: str
    """The changes, such as "recompute none -> selective". Empty if the layout fits as it is."""
    prediction: Prediction


def smallest_change(
    model: Transformer,
    cluster: Cluster,
    layout: Layout,
    job: Workload,
    *,
    constants: CalibratedConstants | None = None,
    calibration: Calibration | None = None,
) -> MemoryChange | None:
    """Returns the change of the fewest settings that makes a layout fit in memory. Among several,
    it is the one with the shortest step.

    Possible changes are to recomputation, ZeRO stage, the format of gradients, micro batch and
    sequence parallelism, and moves of factors of two from data to tensor, pipeline or context
    parallelism. Returns None if no one or two of these changes make the layout fit. Raises
    ValueError for a layout that cannot train the model.

    >>> from unisono import planner
    >>> change = planner.smallest_change(
    ...     planner.load_model("gpt3-22b"),
    ...     planner.Cluster.parse("a100:16"),
    ...     planner.Layout(dp=2, tp=8),
    ...     planner.Workload(seq=2048, global_batch=16, micro_batch=4, recompute="none"),
    ... )
    >>> change.prediction.fits
    True
    """
    known = partial(predict, model, cluster, constants=constants, calibration=calibration)
    now = known(layout, job)
    if now.fits:
        return MemoryChange(text="", prediction=now)
    single = list(_changes(model, cluster, now.layout, now.job))
    for count in (1, 2):
        found = []
        for chosen in combinations(single, count):
            if len({name for name, _, _ in chosen}) < count:
                continue
            prediction = _prediction(known, now, chosen)
            if prediction is not None and prediction.fits:
                text = ", ".join(text for _, text, _ in chosen)
                found.append(MemoryChange(text=text, prediction=prediction))
        if found:
            return min(found, key=lambda change: change.prediction.step_s)
    return None


_Change = tuple[str, str, dict[str, object]]
"""The kind of change, its text, and the new values of the layout and the workload."""


def _prediction(
    known: Callable[[Layout, Workload], Prediction], now: Prediction, chosen: Iterable[_Change]
) -> Prediction | None:
    """Returns the prediction of a changed layout; None if it cannot train the model."""
    try:
        return known(*_applied(now, chosen))
    except ValueError:
        return None


def _applied(now: Prediction, chosen: Iterable[_Change]) -> tuple[Layout, Workload]:
    values = {key: value for _, _, each in chosen for key, value in each.items()}
    of_job = {key: value for key, value in values.items() if hasattr(now.job, key)}
    of_layout = {key: value for key, value in values.items() if key not in of_job}
    return (
        replace(now.layout, **of_layout),  # type: ignore[arg-type]
        replace(now.job, **of_job),  # type: ignore[arg-type]
    )


def _changes(
    model: Transformer, cluster: Cluster, layout: Layout, job: Workload
) -> Iterator[_Change]:
    recompute, micro = job.recompute, job.micro_batch
    assert recompute is not None and micro is not None
    for more in RECOMPUTE[RECOMPUTE.index(recompute) + 1 :]:
        yield "recompute", f"recompute {recompute} -> {more}", {"recompute": more}
    largest_zero = 3 if layout.pp == 1 else 1
    for zero in range(layout.zero + 1, largest_zero + 1):
        yield "zero", f"zero {layout.zero} -> {zero}", {"zero": zero}
    if gradient_bytes(job, layout) > 2 and job.states == "mixed":
        yield "states", "states mixed -> bf16-gradients", {"states": "bf16-gradients"}
    size = micro // 2
    while size:
        if micro % size == 0:
            yield "micro_batch", f"micro_batch {micro} -> {size}", {"micro_batch": size}
        size //= 2
    if layout.tp > 1 and not layout.sequence_parallel:
        change: dict[str, object] = {"sequence_parallel": True}
        yield "sequence_parallel", "sequence_parallel on", change
    for axis in ("tp", "pp", "cp"):
        for factor in (2, 4, 8):
            old = getattr(layout, axis)
            if layout.dp % factor or (axis == "tp" and old * factor > cluster.domain):
                continue
            change = {axis: old * factor, "dp": layout.dp // factor, "vpp": 1}
            yield "axes", f"{axis} {old} -> {old * factor}", change

"""The rules that a layout must meet for a recommendation model."""

from __future__ import annotations

from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.workload import Workload
from unisono.planner.recommendation.dlrm_operators import TABLE_UPDATES

_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


def check_dlrm(cluster: Cluster, layout: Layout, job: Workload, update: str) -> None:
    """Raises ValueError if the layout cannot train a recommendation model. The error says what can.

    >>> from unisono.planner import Cluster, Layout, Workload
    >>> job = Workload(seq=1, global_batch=4096)
    >>> check_dlrm(Cluster.parse("a100:8"), Layout(tp=8), job, "rows")
    Traceback (most recent call last):
    ValueError: tp = 8 does not divide a recommendation model, only dp does; dp = 8 works
    """
    for axis in ("tp", "pp", "cp", "ep", "vpp", "dp_replicate"):
        size = getattr(layout, axis) or 1
        if size > 1:
            raise ValueError(
                f"{axis} = {size} does not divide a recommendation model, only dp does; "
                f"dp = {layout.devices} works"
            )
    if layout.sequence_parallel or layout.tensor != "1d":
        raise ValueError(
            "a recommendation model has no tensor parallelism; sequence_parallel = 0 and "
            "tensor = 1d work"
        )
    if layout.zero > 1:
        raise ValueError(
            f"zero = {layout.zero} does not divide embedding tables that are placed on ranks; "
            "zero = 1 works"
        )
    if layout.devices != cluster.devices:
        raise ValueError(
            f"dp = {layout.dp}, but the cluster has {cluster.devices} devices; "
            f"dp = {cluster.devices} uses them"
        )
    _check_job(layout, job)
    if update not in TABLE_UPDATES:
        raise ValueError(f"table_update: expected {' or '.join(TABLE_UPDATES)}, got {update!r}")


def _check_job(layout: Layout, job: Workload) -> None:
    if job.seq != 1:
        raise ValueError(
            f"a sample of a recommendation model has no sequence: seq = {job.seq}; seq = 1 works"
        )
    if job.recompute not in (None, "none"):
        raise ValueError(
            f"recompute = {job.recompute} is not predicted for recommendation models; none works"
        )
    if job.precision not in _PRECISIONS:
        raise ValueError(
            f"precision: expected one of {', '.join(_PRECISIONS)} for a recommendation model, not "
            f"{job.precision}"
        )
    if job.software is not None:
        raise ValueError(
            f"software = {job.software} trains transformers; None works for recommendation models"
        )
    whole = layout.dp * (job.micro_batch or 1)
    if job.global_batch % whole:
        near = max(round(job.global_batch / whole), 1) * whole
        raise ValueError(
            f"global_batch must be a multiple of dp x micro_batch: {job.global_batch} is not one "
            f"of {whole}; {near} is"
        )

"""The prediction of a recommendation model: placement of tables, step time and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import exp

from unisono.planner.constants.calibrated_constants import CalibratedConstants, default_constants
from unisono.planner.constants.prediction_error import (
    KNOWN_ARCHITECTURES,
    NORMAL_80,
    ErrorCauses,
)
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.workload import Workload
from unisono.planner.own_measurements.calibration import Calibration
from unisono.planner.recommendation.dlrm_check import check_dlrm
from unisono.planner.recommendation.dlrm_fit import DlrmFitter
from unisono.planner.recommendation.dlrm_operators import products
from unisono.planner.recommendation.dlrm_shape import Dlrm
from unisono.planner.recommendation.dlrm_times import DlrmTimes
from unisono.planner.recommendation.table_placement import TablePlacement
from unisono.planner.run_model import USABLE_MEMORY
from unisono.planner.step_times.exchange_times import exchange_times
from unisono.planner.step_times.kernel_times import KernelTimes
from unisono.planner.step_times.time_tree import TimeNode

_TITLES = {
    "lookup": "look-ups in embedding tables",
    "exchange": "exchanges of ids, sums and gradients of tables",
    "matmul": "matrix products",
    "interaction": "interaction",
    "memory": "activations",
    "host": "waiting for the host to launch kernels",
    "gradients": "sum of dense gradients",
    "optimizer": "optimizer",
    "step": "host time of a step",
    "straggler": "waiting for the slowest device",
}


@dataclass(frozen=True, kw_only=True)
class DlrmPrediction:
    """Predicted step time and memory of a recommendation model."""

    model: Dlrm
    cluster: Cluster
    layout: Layout
    job: Workload
    """The workload, with the chosen micro batch."""
    placement: TablePlacement
    """The ranks of the tables."""
    placed_by: str
    """The kind of placement: "auto" or one of `TABLE_KINDS`."""
    step_s: float
    """Seconds of one optimizer step."""
    low_s: float
    """Lower end of the interval that holds 80 % of measured steps, in seconds."""
    high_s: float
    """Upper end of the interval that holds 80 % of measured steps, in seconds."""
    time: Mapping[str, float]
    """Seconds by kind; their sum is `step_s`."""
    memory: Mapping[str, tuple[float, ...]]
    """Bytes of each device, by kind."""
    capacity_bytes: int
    """Bytes that training may use on a device."""
    deviation: float
    """Standard deviation of the logarithm of measured over predicted time."""
    _times: DlrmTimes = field(repr=False, compare=False)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the fullest device."""
        return round(max(map(sum, zip(*self.memory.values(), strict=True))))

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all devices."""
        return self.job.global_batch / self.step_s

    @property
    def mfu(self) -> float:
        """FLOPs of the matrix products and of the interaction over the peak of all devices."""
        every = products(self.model, self.job.global_batch)
        flops = sum(each.flops + each.backward_flops for each in every)
        peak = self._times.kernels.wide_peak * self.cluster.devices
        return flops / (self.step_s * peak)

    @property
    def fits(self) -> bool:
        """True if the fullest device has enough memory."""
        return self.memory_bytes <= self.capacity_bytes

    def explain(self) -> TimeNode:
        """Returns the step time as a tree, whose leaves are formulas with numbers.

        `str` of the result draws the tree.
        """
        assert self.job.micro_batch is not None
        microbatches = self.job.global_batch // (self.layout.dp * self.job.micro_batch)
        parts = list(self._times.parts(self.job.micro_batch))
        formulas = {
            "gradients": f"all_reduce of {self._times.gradient_bytes:.3g} bytes",
            "host": "launches of operators that take the host longer than the device",
        }
        nodes = [
            TimeNode(
                name=_TITLES[kind],
                seconds=seconds,
                formula=formulas.get(kind, ""),
                children=tuple(
                    TimeNode(
                        name=part.name, seconds=microbatches * part.seconds, formula=part.formula
                    )
                    for part in parts
                    if part.kind == kind
                ),
            )
            for kind, seconds in self.time.items()
            if seconds
        ]
        nodes.sort(key=lambda node: -node.seconds)
        width = self.high_s / self.step_s - 1
        return TimeNode(
            name=f"step of {self.layout.text()}, micro batch {self.job.micro_batch}",
            seconds=self.step_s,
            formula=f"80 % interval: within {width:.0%}",
            children=tuple(nodes),
        )


def predict_dlrm(
    model: Dlrm,
    cluster: Cluster,
    layout: Layout,
    job: Workload,
    *,
    placement: str = "auto",
    table_update: str = "rows",
    constants: CalibratedConstants | None = None,
    calibration: Calibration | None = None,
) -> DlrmPrediction:
    """Predicts a step of a recommendation model; `unisono.planner.predict` calls this function.

    Raises ValueError for a layout, a workload, a placement or an update that is not possible.
    """
    check_dlrm(cluster, layout, job, table_update)
    constants = constants or default_constants()
    if calibration is not None:
        constants = calibration.with_links(cluster, constants)
    capacity = cluster.kind.memory_bytes * USABLE_MEMORY
    kernels = KernelTimes(cluster.kind, constants, precision=job.precision)
    fit = DlrmFitter(
        model=model,
        layout=layout,
        job=job,
        kind=placement,
        update=table_update,
        value_bytes=kernels.wide_bytes,
        fragmentation=constants.fragmentation,
        capacity_bytes=capacity,
    ).choose()
    exchanges = exchange_times(cluster, constants)
    times = DlrmTimes(model, fit.placement, kernels, exchanges, constants, update=table_update)
    microbatches = job.global_batch // (layout.dp * fit.samples)
    kinds = times.step(fit.samples, microbatches, layout.zero)
    step_s = sum(kinds.values())
    deviation = _causes(kinds, cluster).deviation(constants.sigma)
    half_width = NORMAL_80 * deviation
    return DlrmPrediction(
        model=model,
        cluster=cluster,
        layout=layout,
        job=replace(job, micro_batch=fit.samples, recompute="none"),
        placement=fit.placement,
        placed_by=placement,
        step_s=step_s,
        low_s=step_s / exp(half_width),
        high_s=step_s * exp(half_width),
        time=kinds,
        memory=fit.memory,
        capacity_bytes=int(capacity),
        deviation=deviation,
        _times=times,
    )


def _causes(kinds: Mapping[str, float], cluster: Cluster) -> ErrorCauses:
    """Returns the causes of the error.

    No constant was fitted to recommendation models, except the host's time of a step. So the
    property "experts", the largest error of a kind of model, counts too, and the host's share does
    not.
    """
    known = cluster.kind.architecture in KNOWN_ARCHITECTURES
    properties = ("experts",) if known else ("experts", "other device")
    return ErrorCauses.of(kinds, properties)._replace(host=0.0)

"""Predictions of recommendation models, and the search for the best placement of their tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import exp

from unisono.planner.constants.calibrated_constants import CalibratedConstants, default_constants
from unisono.planner.constants.prediction_error import KNOWN_ARCHITECTURES, NORMAL_80, ErrorCauses
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.workload import Workload
from unisono.planner.layout_evaluation import USABLE_MEMORY
from unisono.planner.own_measurements.calibration import Calibration
from unisono.planner.recommendation.dlrm import Dlrm, load_dlrm
from unisono.planner.recommendation.dlrm_check import check_dlrm
from unisono.planner.recommendation.dlrm_memory import DlrmMemory
from unisono.planner.recommendation.dlrm_operators import products
from unisono.planner.recommendation.dlrm_times import DlrmTimes
from unisono.planner.recommendation.greedy_placement import AUTO
from unisono.planner.recommendation.table_placement import TABLE_KINDS, TablePlacement
from unisono.planner.stated_inputs import stated_cluster, stated_layout
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
    memory_bytes: int
    """Bytes of the fullest device."""
    capacity_bytes: int
    """Bytes that training may use on a device."""
    _times: DlrmTimes = field(repr=False, compare=False)

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all devices."""
        return self.job.global_batch / self.step_s

    @property
    def mfu(self) -> float:
        """FLOPs of the matrix products and of the interaction over the peak of all devices."""
        every = products(self.model, self.job.global_batch)
        flops = sum(each.flops + each.backward_flops for each in every)
        return flops / (self.step_s * self._times.kernels.wide_peak * self.cluster.devices)

    @property
    def fits(self) -> bool:
        """True if the fullest device has enough memory."""
        return self.memory_bytes <= self.capacity_bytes

    def explain(self) -> TimeNode:
        """Returns the step time as a tree, whose leaves are formulas with numbers.

        `str` of the result draws the tree.
        """
        samples = self.job.micro_batch
        assert samples is not None
        microbatches = self.job.global_batch // (self.layout.dp * samples)
        children: dict[str, list[TimeNode]] = {kind: [] for kind in self.time}
        for part in self._times.parts(samples):
            children[part.kind].append(
                TimeNode(name=part.name, seconds=microbatches * part.seconds, formula=part.formula)
            )
        formulas = {
            "gradients": f"all_reduce of {self._times.gradient_bytes:.3g} bytes",
            "host": "launches of operators that take the host longer than the device",
        }
        nodes = [
            TimeNode(
                name=_TITLES[kind],
                seconds=seconds,
                formula=formulas.get(kind, ""),
                children=tuple(children[kind]),
            )
            for kind, seconds in self.time.items()
            if seconds
        ]
        return TimeNode(
            name=f"step of {self.layout.text()}, micro batch {samples}",
            seconds=self.step_s,
            formula=f"80 % interval: within {self.high_s / self.step_s - 1:.0%}",
            children=tuple(sorted(nodes, key=lambda node: -node.seconds)),
        )


def predict(
    model: Dlrm | str,
    cluster: Cluster | str,
    layout: Layout | str,
    job: Workload,
    *,
    placement: str = AUTO,
    table_update: str = "rows",
    constants: CalibratedConstants | None = None,
    calibration: Calibration | None = None,
) -> DlrmPrediction:
    """Predicts a training step of a recommendation model.

    `job` counts samples, with seq = 1. Only `dp` and ZeRO 0 or 1 are possible in the layout.
    `placement` is the kind of placement of the tables, for `place_tables`. `table_update` is one of
    `TABLE_UPDATES`. A calibration only changes the rates of links. A model, cluster or layout may
    be a text of the command line. Raises ValueError for a layout, a workload, a placement or an
    update that is not possible.

    >>> from unisono.planner import Workload, recommendation
    >>> job = Workload(seq=1, global_batch=65536, precision="tf32")
    >>> found = recommendation.predict("dlrm-mlperf", "a100:8", "dp=8", job)
    >>> found.low_s < found.step_s < found.high_s and found.fits
    True
    """
    if isinstance(model, str):
        model = load_dlrm(model)
    cluster, layout = stated_cluster(cluster), stated_layout(layout)
    check_dlrm(cluster, layout, job, table_update)
    constants = constants or default_constants()
    if calibration is not None:
        constants = calibration.with_links(cluster, constants)
    capacity = cluster.kind.memory_bytes * USABLE_MEMORY
    kernels = KernelTimes(cluster.kind, constants, precision=job.precision)
    fit = DlrmMemory(
        model=model,
        layout=layout,
        job=job,
        kind=placement,
        update=table_update,
        value_bytes=kernels.wide_bytes,
        fragmentation=constants.fragmentation,
        capacity_bytes=capacity,
    ).fitting()
    exchanges = exchange_times(cluster, constants)
    times = DlrmTimes(model, fit.placement, kernels, exchanges, constants, update=table_update)
    microbatches = job.global_batch // (layout.dp * fit.samples)
    kinds = times.step(fit.samples, microbatches, layout.zero)
    step_s = sum(kinds.values())
    half_width = NORMAL_80 * _causes(kinds, cluster).deviation(constants.sigma)
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
        memory_bytes=round(fit.fullest_bytes),
        capacity_bytes=int(capacity),
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


def search(
    model: Dlrm | str,
    cluster: Cluster | str,
    job: Workload,
    *,
    objective: str = "time",
    longest_s: float | None = None,
    keep: int = 10,
    table_update: str = "rows",
    constants: CalibratedConstants | None = None,
    calibration: Calibration | None = None,
) -> tuple[DlrmPrediction, ...]:
    """Predicts each kind of placement with ZeRO 0 and 1 on all devices, and returns the `keep` best
    that fit.

    `objective`: the shortest "time" of a step, or the least "memory" of the fullest device. Kinds
    with equal placements count once, under the name that is first in ("auto", *TABLE_KINDS). Raises
    ValueError if no placement fits or takes at most `longest_s`.

    >>> from unisono.planner import Workload, recommendation
    >>> job = Workload(seq=1, global_batch=65536, precision="tf32")
    >>> found = recommendation.search("dlrm-mlperf", "a100:8", job)
    >>> found[0].step_s <= found[1].step_s
    True
    """
    if objective not in ("time", "memory"):
        raise ValueError(
            f"objective = {objective} is not searched for recommendation models; time and memory "
            "are"
        )
    cluster = stated_cluster(cluster)
    found: dict[object, DlrmPrediction] = {}
    stages = (0, 1) if cluster.devices > 1 else (0,)
    for kind, zero in product((AUTO, *TABLE_KINDS), stages):
        prediction = predict(
            model,
            cluster,
            Layout(dp=cluster.devices, zero=zero),
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
    best = [each for each in fitting if longest_s is None or each.step_s <= longest_s]
    if not best:
        shortest = min(fitting, key=lambda each: each.step_s)
        raise ValueError(
            f"no step takes {longest_s:.4g} s or less; the shortest takes {shortest.step_s:.4g} s "
            f"({shortest.layout.text()}, placement {shortest.placed_by})"
        )
    best.sort(key=lambda each: each.step_s if objective == "time" else each.memory_bytes)
    return tuple(best[:keep])

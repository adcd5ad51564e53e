"""The sensitivity of the step time to the properties of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import log

from unisono.planner.constants.calibrated_constants import CalibratedConstants, default_constants
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import Workload
from unisono.planner.own_measurements.calibration import Calibration
from unisono.planner.prediction import predict
from unisono.planner.stated_inputs import stated_cluster, stated_layout, stated_model

_CHANGE = 1.01
_HOST_TIMES = (
    *("eager_launch_s", "launch_s", "expert_launch_s", "pair_launch_s"),
    *("eager_step_s", "step_s", "microbatch_s", "kernel_start_s"),
)
_START_TIMES = ("round_s", "link_start_s", "link_rank_s", "network_start_s")


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The effect of one property of the machine on the step time."""

    name: str
    elasticity: float
    """Percent by which the step time falls if the property improves by one percent."""
    factor: float
    improved_s: float
    """Step time in seconds if the property improves by `factor` and the planner then makes the open
    choices (values of None) again."""
    saved: float
    """Share of the step time that the improvement saves."""


_Machine = tuple[Cluster, CalibratedConstants]


def sensitivity(
    model: Transformer | str,
    cluster: Cluster | str,
    layout: Layout | str,
    job: Workload,
    *,
    factor: float = 2.0,
    constants: CalibratedConstants | None = None,
    calibration: Calibration | None = None,
) -> tuple[Sensitivity, ...]:
    """Returns the effect of each property of a machine on the step time, largest effect first.

    Properties: rate of matrix products, memory rate, memory size, rate of links in a domain, rate
    of the network, start-up times of exchanges, host times. Elasticities are central differences of
    1 %. A larger memory helps only where `job` or `layout` leaves a choice open (None). For a
    cluster with a topology, the rates of links are omitted. Raises ValueError for a layout that
    cannot train the model, and for a factor that is not over 1.

    >>> from unisono import planner
    >>> rows = planner.sensitivity(
    ...     planner.load_model("gpt3-22b"),
    ...     planner.Cluster.parse("a100:64"),
    ...     planner.Layout(dp=8, tp=8, sequence_parallel=True, zero=1),
    ...     planner.Workload(seq=2048, global_batch=64, micro_batch=1, recompute="selective"),
    ... )
    >>> rows[0].name
    'rate of matrix products'
    """
    if not factor > 1:
        raise ValueError(f"factor must be over 1, not {factor}")
    shipped = constants or default_constants()
    model, cluster = stated_model(model), stated_cluster(cluster)
    layout = stated_layout(layout)
    now = predict(model, cluster, layout, job, constants=shipped, calibration=calibration)

    def step_s(machine: _Machine, chosen: Layout, work: Workload) -> float:
        where, values = machine
        found = predict(model, where, chosen, work, constants=values, calibration=calibration)
        return found.step_s

    rows = []
    for name, better in _properties(cluster, shipped):
        more_s = step_s(better(_CHANGE), now.layout, now.job)
        less_s = step_s(better(1 / _CHANGE), now.layout, now.job)
        improved_s = step_s(better(factor), layout, job)
        rows.append(
            Sensitivity(
                name=name,
                elasticity=log(less_s / more_s) / (2 * log(_CHANGE)),
                factor=factor,
                improved_s=improved_s,
                saved=1 - improved_s / now.step_s,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.saved))


def _properties(
    cluster: Cluster, constants: CalibratedConstants
) -> Iterator[tuple[str, Callable[[float], _Machine]]]:
    device = cluster.stated_device

    def with_device(**values: object) -> _Machine:
        return replace(cluster, device=replace(device, **values)), constants  # type: ignore[arg-type]

    def faster(names: tuple[str, ...], factor: float) -> _Machine:
        return cluster, constants.changed(**{n: getattr(constants, n) / factor for n in names})

    yield (
        "rate of matrix products",
        lambda f: with_device(peak={name: rate * f for name, rate in device.peak.items()}),
    )
    yield "memory rate", lambda f: with_device(memory_Bps=device.memory_Bps * f)
    yield "memory size", lambda f: with_device(memory_bytes=round(device.memory_bytes * f))
    if cluster.topology is None:
        yield (
            "rate of links in a domain",
            lambda f: (replace(cluster, link_Bps=cluster.domain_Bps * f), constants),
        )
        network_Bps = cluster.between_Bps * cluster.oversubscription
        yield (
            "rate of the network",
            lambda f: (replace(cluster, network_Bps=network_Bps * f), constants),
        )
    yield "start-up times of exchanges", lambda f: faster(_START_TIMES, f)
    yield "host times", lambda f: faster(_HOST_TIMES, f)

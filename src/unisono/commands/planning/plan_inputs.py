"""Reads the inputs of `unisono plan`: model, cluster, layout, workload and calibration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unisono.commands.planning.plan_options import PlanOptions
from unisono.planner import Calibration, Cluster, Layout, Transformer, Workload, load_model

DEFAULT_SEQ = 2048


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """The inputs of the planner's functions."""

    model: Transformer
    cluster: Cluster
    job: Workload
    layout: Layout | None
    calibration: Calibration | None
    title: str


def read_inputs(options: PlanOptions) -> PlanInputs:
    """Reads the inputs from the files and texts that the options name. Raises ValueError."""
    assert options.model and options.cluster and options.batch is not None
    seq = DEFAULT_SEQ if options.seq is None else options.seq
    model = load_model(options.model)
    title = f"{options.model} on {options.cluster}, batch {options.batch} x {seq}"
    if model.approximations:
        title += f" (approximated: {', '.join(model.approximations)})"
    return PlanInputs(
        model=model,
        cluster=read_cluster(options.cluster, options.topology),
        job=Workload(
            seq=seq,
            global_batch=options.batch,
            micro_batch=options.micro_batch,
            precision=options.precision,
            recompute=options.recompute,
            software=options.software,
        ),
        layout=None if options.layout is None else Layout.read(options.layout),
        calibration=None if options.calibration is None else Calibration.load(options.calibration),
        title=title,
    )


def read_cluster(text: str, topology: str | None) -> Cluster:
    """Reads a cluster and, if given, the topology of its network. Raises ValueError."""
    found = Cluster.read(text)
    if topology is None:
        return found
    from unisono.topology import load

    return replace(found, topology=load(topology))

"""Reads the inputs of `unisono plan`: model, cluster, layout, workload and calibration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unisono.commands.planning.plan_options import PlanOptions
from unisono.job_files import SimilarJob, read_job
from unisono.planner import (
    Calibration,
    Cluster,
    Layout,
    Transformer,
    Workload,
    load_model,
)

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
    if options.trainable != "all":
        title += f", {options.trainable}"
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
            states=options.states,
            trainable=options.trainable,
            document=options.document,
            padding=options.padding,
            offload=options.offload,
            context=options.context_kind,
        ),
        layout=None if options.layout is None else Layout.read(options.layout),
        calibration=None if options.calibration is None else Calibration.load(options.calibration),
        title=title,
    )


def read_similar(options: PlanOptions) -> tuple[PlanInputs, SimilarJob]:
    """Reads the inputs from the file of another framework's job (`--like`); options replace what
    the file states. Raises ValueError for what neither states, with the option.
    """
    assert options.like is not None and options.cluster is not None
    job = read_job(options.like)
    model = job.model if options.model is None else load_model(options.model)
    if model is None:
        raise ValueError(f"--model is needed: {job.missing.get('--model', 'the file has none')}")
    text = options.cluster
    if ":" not in text and not text.endswith(".json"):
        if job.devices is None:
            raise ValueError(f"--cluster {text}:COUNT is needed: the file states no devices")
        text = f"{text}:{job.devices}"
    cluster = read_cluster(text, options.topology)
    if options.layout is None and "--layout" in job.missing:
        raise ValueError(f"--layout is needed: {job.missing['--layout']}")
    layout = Layout.read(options.layout) if options.layout else job.layout_on(cluster.devices)
    work = job.workload_on(
        layout,
        seq=options.seq,
        global_batch=options.batch,
        micro_batch=options.micro_batch,
        precision=None if options.precision == "bf16" else options.precision,
        recompute=options.recompute,
        software=options.software,
        trainable=options.trainable,
        document=options.document,
        padding=options.padding,
        offload=options.offload or None,
        context=None if options.context_kind == "ring" else options.context_kind,
    )
    inputs = PlanInputs(
        model=model,
        cluster=cluster,
        job=work,
        layout=layout,
        calibration=None if options.calibration is None else Calibration.load(options.calibration),
        title=f"{job.source} job of {options.like} on {text}, batch {work.global_batch} x "
        f"{work.seq}, {model.parameters / 1e9:.4g} billion parameters",
    )
    return inputs, job


def read_cluster(text: str, topology: str | None) -> Cluster:
    """Reads a cluster and, if given, the topology of its network. Raises ValueError."""
    found = Cluster.read(text)
    if topology is None:
        return found
    from unisono.topology import load

    return replace(found, topology=load(topology))

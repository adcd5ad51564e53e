"""Why no layout fits in memory, and what would make one fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import NamedTuple

from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.workload import RECOMPUTE
from unisono.planner.layout_search.search_space import OptionRequest, open_layouts

_LARGEST_FACTOR = 1024


class LeastMemory(NamedTuple):
    """The combination of settings that needs the least memory on the fullest device."""

    nbytes: float
    layout: Layout
    micro_batch: int
    recompute: str


def least_memory(
    request: OptionRequest, cluster: Cluster, *, largest_tp: float = inf
) -> LeastMemory | None:
    """Returns the combination that needs the least memory; None if no layout divides the model."""
    run = request.run(cluster)
    best: LeastMemory | None = None
    for layout in open_layouts(request, run):
        if layout.tp > largest_tp:
            continue
        per_replica = run.workload.global_batch // layout.dp
        sizes = run.micro_batches(per_replica)
        for micro_batch in sizes[:1]:
            chunks = run.chunk_counts(layout, per_replica // micro_batch)
            for full in (replace(layout, vpp=each) for each in chunks[:1]):
                recompute = run.recomputations()[-1]
                nbytes = run.memory.fullest_bytes(full, micro_batch, recompute)
                if best is None or nbytes < best.nbytes:
                    best = LeastMemory(nbytes, full, micro_batch, recompute)
    return best


def _fitting(
    request: OptionRequest, cluster: Cluster, *, largest_tp: float = inf
) -> LeastMemory | None:
    """Returns the combination that needs the least memory; None if it does not fit either."""
    least = least_memory(request, cluster, largest_tp=largest_tp)
    fits = least is not None and least.nbytes <= request.run(cluster).capacity_bytes
    return least if fits else None


def nothing_fits_text(request: OptionRequest, cluster: Cluster) -> str:
    """Returns what lacks on a cluster, and each change that makes a layout fit."""
    least = least_memory(request, cluster)
    if least is None:
        return (
            f"no layout of {cluster.devices} devices divides {request.model.heads} heads and a "
            f"batch of {request.job.global_batch}"
        )
    capacity = request.run(cluster).capacity_bytes
    text = (
        f"nothing fits: {least.layout.text()} with micro batch {least.micro_batch} and recompute "
        f"{least.recompute} needs least, {least.nbytes / 1e9:.1f} GB, and a device has "
        f"{capacity / 1e9:.1f} GB for training"
    )
    changes = list(_fitting_changes(request, cluster))
    if not changes:
        return f"{text}; a smaller model, or devices with more memory, fit"
    return f"{text}; what fits: {', or '.join(changes)}"


def fitting_devices(request: OptionRequest, cluster: Cluster) -> LeastMemory | None:
    """Returns the layout of the fewest devices that fits, of the cluster's number times a power of
    two; None if no number up to 1,024 times as many works.
    """
    factor = 2
    while factor <= _LARGEST_FACTOR and cluster.topology is None:
        larger = replace(
            cluster, devices=factor * cluster.devices, per_host=_domain(cluster, factor)
        )
        least = _fitting(request, larger, largest_tp=larger.domain)
        if least is not None:
            return least
        factor *= 2
    return None


def _domain(cluster: Cluster, factor: int) -> int:
    """Returns the devices of a host, or of an NVLink domain, in a larger cluster."""
    if cluster.domain < cluster.devices or cluster.kind.architecture == "cpu":
        return cluster.domain
    return min(max(cluster.kind.per_host, cluster.domain), factor * cluster.devices)


def _fitting_changes(request: OptionRequest, cluster: Cluster) -> Iterator[str]:
    """Yields the changes of what the caller has stated, and the number of devices, that fit."""
    job = request.job
    stated = [
        (f"recompute {job.recompute} -> {RECOMPUTE[-1]}", {"recompute": RECOMPUTE[-1]})
        if job.recompute not in (None, RECOMPUTE[-1])
        else None,
        (f"micro_batch {job.micro_batch} -> 1", {"micro_batch": 1})
        if job.micro_batch not in (None, 1)
        else None,
    ]
    for text, values in filter(None, stated):
        changed = replace(request, job=replace(job, **values))  # type: ignore[arg-type]
        if _fitting(changed, cluster) is not None:
            yield text
    yield from _fitting_offload(request, cluster)
    yield from _fitting_adapters(request, cluster)
    larger = fitting_devices(request, cluster)
    if larger is not None:
        layout = larger.layout
        yield f"{layout.devices} devices ({layout.text()}, {larger.nbytes / 1e9:.1f} GB)"


def _fitting_offload(request: OptionRequest, cluster: Cluster) -> Iterator[str]:
    """Yields offload of the optimizer states, if the device's link is known and a layout fits."""
    if request.job.offload:
        return
    changed = replace(request, job=replace(request.job, offload=True))
    try:
        least = _fitting(changed, cluster)
    except ValueError:
        return
    if least is not None:
        memory = changed.run(cluster).memory
        host = memory.host_bytes(least.layout) * min(cluster.domain, cluster.devices)
        yield (
            f"offload ({least.layout.text()}, {least.nbytes / 1e9:.1f} GB, and {host / 1e9:,.0f} "
            "GB in each host)"
        )


def _fitting_adapters(request: OptionRequest, cluster: Cluster) -> Iterator[str]:
    """Yields adapters that fit instead of all weights."""
    model, text = request.model, "lora:16:attention" if request.model.experts else "lora:16"
    if request.job.trainable != "all" or model.kv_rank:
        return
    changed = replace(request, job=replace(request.job, trainable=text))
    least = _fitting(changed, cluster)
    if least is not None:
        yield f"trainable all -> {text} ({least.layout.text()}, {least.nbytes / 1e9:.1f} GB)"

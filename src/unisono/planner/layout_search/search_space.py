"""The combinations that a search considers, each with a lower bound of its step time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from unisono.division import divisors
from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.layout_check import divides_heads
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import Workload
from unisono.planner.layout_evaluation import RunModel
from unisono.planner.own_measurements.calibration import Calibration

HEADROOM = 0.1
"""Share of the capacity that found layouts leave free: the error of predicted memory is as large,
and 31 of 32 publishers of layouts leave as much in most of their runs."""


@dataclass(frozen=True, kw_only=True)
class OptionRequest:
    """The inputs of a search, except the cluster. The executor's workers receive them."""

    model: Transformer
    job: Workload
    schedules: tuple[str, ...]
    constants: CalibratedConstants
    calibration: Calibration | None
    headroom: float = HEADROOM

    def run(self, cluster: Cluster) -> RunModel:
        """Returns the model of times and memory on a cluster."""
        return RunModel(self.model, cluster, self.job, self.constants, self.calibration)


class OpenLayout:
    """A layout whose interleaving (`vpp`) is not chosen yet. Keeps the complete layout for each
    interleaving.
    """

    __slots__ = ("_layouts", "layout")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._layouts: dict[int, Layout] = {}

    def with_chunks(self, chunks: int) -> Layout:
        """Returns the complete layout with this number of layer groups on each stage (`vpp`)."""
        found = self._layouts.get(chunks)
        if found is None:
            found = self._layouts[chunks] = replace(self.layout, vpp=chunks)
        return found


class LayoutOption(NamedTuple):
    """A combination of layout, micro batch and recomputation, and the lower bound of its time.

    `place` is the position of the option among all combinations with the same (tp, pp). It orders
    combinations of equal time, so that the result of a search does not depend on how the search is
    divided among workers.
    """

    bound_s: float
    place: tuple[int, int, int]
    open_layout: OpenLayout
    chunks: int
    micro_batch: int
    recompute: str

    @property
    def layout(self) -> Layout:
        """The complete layout, including the chosen interleaving."""
        return self.open_layout.with_chunks(self.chunks)

    def fits(self, run: RunModel, headroom: float) -> bool:
        """Returns True if the fullest device leaves this share of the capacity free."""
        return run.memory.fits(self.layout, self.micro_batch, self.recompute, headroom)

    def memory_bytes(self, run: RunModel) -> float:
        """Returns the bytes of the fullest device."""
        return run.memory.fullest_bytes(self.layout, self.micro_batch, self.recompute)


Bound = Callable[[int, str], float]
"""Returns the lower bound of the step time for a micro batch and a recomputation."""


class OptionGroup(NamedTuple):
    """The options with one layout and micro batch: each recomputation with each interleaving. The
    bound is that of the first recomputation, which is the fastest.
    """

    bound_s: float
    place: tuple[int, int, int]
    """The place of the first option."""
    open_layout: OpenLayout
    counts: Sequence[int]
    micro_batch: int
    recomputations: Sequence[str]
    bound: Bound

    def options(self) -> Iterator[LayoutOption]:
        """Yields the options."""
        tp, pp, number = self.place
        for recompute in self.recomputations:
            bound_s = self.bound(self.micro_batch, recompute)
            for chunks in self.counts:
                yield LayoutOption(
                    bound_s, (tp, pp, number), self.open_layout, chunks, self.micro_batch, recompute
                )
                number += 1


def tensor_pipeline_sizes(model: Transformer, cluster: Cluster) -> list[tuple[int, int]]:
    """Returns the pairs (tp, pp) that a search considers.

    >>> gpt = Transformer(layers=2, hidden=8, heads=2, vocab=10)
    >>> tensor_pipeline_sizes(gpt, Cluster(device="a100", devices=4))
    [(1, 1), (1, 2), (2, 1), (2, 2)]
    """
    return [
        (tp, pp)
        for tp in divisors(cluster.devices)
        if tp <= 2 * cluster.domain and divides_heads(model.heads, model.kv_heads, tp)
        for pp in divisors(cluster.devices // tp)
        if pp <= model.layers
    ]


def layout_options(
    request: OptionRequest,
    run: RunModel,
    sizes: Sequence[tuple[int, int]],
    inner: tuple[int, int] | None = None,
) -> list[LayoutOption]:
    """Returns the options whose layouts have these pairs (tp, pp), lowest bound first. `inner`:
    only those with this pair (cp, ep).
    """
    groups = option_groups(request, run, sizes, inner)
    return sorted(option for group in groups for option in group.options())


def option_groups(
    request: OptionRequest,
    run: RunModel,
    sizes: Sequence[tuple[int, int]],
    inner: tuple[int, int] | None = None,
) -> Iterator[OptionGroup]:
    """Yields the groups of the options whose layouts have these pairs (tp, pp)."""
    modes = run.recomputations()
    for tp, pp in sizes:
        number = 0
        known: dict[object, list[tuple[int, float, Bound]]] = {}
        for layout in _open_layouts(request, run, tp, pp, inner):
            open_layout = OpenLayout(layout)
            # Layouts that differ only in ZeRO 0 and 1, or in the schedule, have the same bounds.
            key = layout.dp, *(run.times.layer_key(layout, experts=e) for e in (False, True))
            if key not in known:
                known[key] = list(_bounds(run, layout))
            for micro_batch, bound_s, bound in known[key]:
                microbatches = run.workload.global_batch // layout.dp // micro_batch
                counts = run.chunk_counts(layout, microbatches)
                if counts:
                    place = tp, pp, number
                    yield OptionGroup(
                        bound_s, place, open_layout, counts, micro_batch, modes, bound
                    )
                    number += len(counts) * len(modes)


def open_layouts(request: OptionRequest, run: RunModel) -> Iterator[Layout]:
    """Yields all layouts of a search, with `vpp` = None."""
    for tp, pp in tensor_pipeline_sizes(request.model, run.cluster):
        yield from _open_layouts(request, run, tp, pp)


def _open_layouts(
    request: OptionRequest, run: RunModel, tp: int, pp: int, inner: tuple[int, int] | None = None
) -> Iterator[Layout]:
    model, job = run.model, run.workload
    replicas = run.cluster.devices // (tp * pp)
    for cp in _context_sizes(job.seq, replicas):
        dp = replicas // cp
        whole_heads = job.context != "ulysses" or cp == 1 or model.heads % (cp * tp) == 0
        if job.global_batch % dp or not whole_heads:
            continue
        experts = divisors(model.experts) if model.experts else [1]
        splits = (False, True) if tp > 1 and job.seq % (cp * tp) == 0 else (False,)
        shards = _shardings(run.cluster, tp, pp, cp, dp, offload=job.offload)
        for ep, split, (zero, copies), schedule in product(
            experts, splits, shards, request.schedules
        ):
            if dp // copies * cp * tp % ep == 0 and inner in (None, (cp, ep)):
                yield Layout(
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    cp=cp,
                    ep=ep,
                    vpp=None,
                    sequence_parallel=split,
                    zero=zero,
                    dp_replicate=copies,
                    schedule=schedule,
                )


def _bounds(run: RunModel, layout: Layout) -> Iterator[tuple[int, float, Bound]]:
    """Yields each micro batch, with the bound of its fastest recomputation and with a function that
    returns the bound of each.

    The bound is the time of an average stage for all microbatches: no step is shorter, because the
    slowest stage takes at least as long as the average one.
    """
    model, times = run.model, run.times
    counts = {False: model.layers - model.moe_layers, True: model.moe_layers}
    layers = [(times.layer_s(layout, experts=e), count) for e, count in counts.items() if count]
    per_replica = run.workload.global_batch // layout.dp

    def bound(micro_batch: int, recompute: str) -> float:
        stages = per_replica // micro_batch * run.least_factor / layout.pp
        return stages * sum([count * layer_s(micro_batch, recompute) for layer_s, count in layers])

    for micro_batch in run.micro_batches(per_replica):
        yield micro_batch, bound(micro_batch, run.recomputations()[0]), bound


def _shardings(
    cluster: Cluster, tp: int, pp: int, cp: int, dp: int, *, offload: bool
) -> list[tuple[int, int]]:
    """Returns the ZeRO stages to try, each with a number of replicas of the shards.

    In a pipeline, stages 2 and 3 save no memory during a step, so stage 1 is the largest. Replicas
    save time if they keep the exchanges of ZeRO-3 in few domains: one, two or four.
    """
    if dp * cp == 1:
        return [(0, 1)]
    if pp > 1:
        return [(0, 1), (1, 1)]
    found = [(0, 1), (1, 1), (2, 1)]
    if offload:
        return found
    found.append((3, 1))
    for domains in (1, 2, 4):
        shards, rest = divmod(domains * cluster.domain, tp * cp)
        if shards and not rest and shards < dp and dp % shards == 0:
            found.append((3, dp // shards))
    return found


def _context_sizes(seq: int, replicas: int) -> list[int]:
    """Returns the powers of two for `cp` that give each device at least 1,024 positions."""
    sizes, size = [], 1
    while replicas % size == 0 and (size == 1 or seq // size >= 1024) and seq % size == 0:
        sizes.append(size)
        size *= 2
    return sizes

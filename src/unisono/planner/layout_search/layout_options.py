"""The combinations that a search considers, each with a lower bound of its step time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from unisono.planner.own_measurements.calibration import Calibration
from unisono.planner.run_model import RunModel


@dataclass(frozen=True, kw_only=True)
class OptionRequest:
    """The inputs of a search, except the cluster. The executor's workers receive them."""

    model: Transformer
    job: Workload
    schedules: tuple[str, ...]
    constants: CalibratedConstants
    calibration: Calibration | None

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

    def fits(self, run: RunModel) -> bool:
        """Returns True if the fullest device has enough memory."""
        return run.memory.fits(self.layout, self.micro_batch, self.recompute)

    def memory_bytes(self, run: RunModel) -> float:
        """Returns the bytes of the fullest device."""
        return run.memory.fullest_bytes(self.layout, self.micro_batch, self.recompute)


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
    request: OptionRequest, run: RunModel, sizes: Sequence[tuple[int, int]]
) -> list[LayoutOption]:
    """Returns the options whose layouts have these pairs (tp, pp), lowest bound first."""
    options = [option for tp, pp in sizes for option in _of_sizes(request, run, tp, pp)]
    options.sort(key=lambda option: (option.bound_s, option.place))
    return options


def _of_sizes(request: OptionRequest, run: RunModel, tp: int, pp: int) -> Iterator[LayoutOption]:
    """Yields the options whose layouts have these `tp` and `pp`."""
    number = 0
    for layout in _open_layouts(request, run, tp, pp):
        open_layout = OpenLayout(layout)
        for micro_batch, recompute, bound_s in _bounds(run, layout):
            microbatches = run.workload.global_batch // layout.dp // micro_batch
            for chunks in run.chunk_counts(layout, microbatches):
                number += 1
                place = (tp, pp, number)
                yield LayoutOption(bound_s, place, open_layout, chunks, micro_batch, recompute)


def _open_layouts(request: OptionRequest, run: RunModel, tp: int, pp: int) -> Iterator[Layout]:
    model, job = run.model, run.workload
    replicas = run.cluster.devices // (tp * pp)
    for cp in _context_sizes(job.seq, replicas):
        dp = replicas // cp
        if job.global_batch % dp:
            continue
        experts = divisors(model.experts) if model.experts else [1]
        splits = (False, True) if tp > 1 and job.seq % (cp * tp) == 0 else (False,)
        stages = _zero_stages(pp, dp * cp)
        for ep, split, zero, schedule in product(experts, splits, stages, request.schedules):
            if (dp * cp * tp) % ep == 0:
                yield Layout(
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    cp=cp,
                    ep=ep,
                    vpp=None,
                    sequence_parallel=split,
                    zero=zero,
                    schedule=schedule,
                )


def _bounds(run: RunModel, layout: Layout) -> Iterator[tuple[int, str, float]]:
    """Yields each combination of micro batch and recomputation with a lower bound of its step time.

    The bound is the time of an average stage for all microbatches: no step is shorter, because the
    slowest stage has at least the average number of layers.
    """
    share = run.model.layers / layout.pp * run.least_factor
    per_replica = run.workload.global_batch // layout.dp
    kinds = {run.model.moe_layers > 0, run.model.moe_layers == run.model.layers}
    for micro_batch in run.micro_batches(per_replica):
        microbatches = per_replica // micro_batch
        for recompute in run.recomputations():
            layer_s = min(
                run.times.layer_s(layout, micro_batch, recompute, experts=experts)
                for experts in kinds
            )
            yield micro_batch, recompute, microbatches * share * layer_s


def _zero_stages(pp: int, shards: int) -> tuple[int, ...]:
    """Returns the ZeRO stages to try.

    In a pipeline, stages 2 and 3 save no memory during a step, so stage 1 is the largest.
    """
    if shards == 1:
        return (0,)
    return (0, 1, 2, 3) if pp == 1 else (0, 1)


def _context_sizes(seq: int, replicas: int) -> list[int]:
    """Returns the powers of two for `cp` that give each device at least 1,024 positions."""
    sizes, size = [], 1
    while replicas % size == 0 and (size == 1 or seq // size >= 1024) and seq % size == 0:
        sizes.append(size)
        size *= 2
    return sizes

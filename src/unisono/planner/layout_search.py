"""The exact search for the fastest layouts: no layout that it skips can be among the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from unisono.planner.calibrated_constants import CalibratedConstants, default_constants
from unisono.planner.device_cluster import Cluster
from unisono.planner.layout import Layout
from unisono.planner.layout_candidates import Candidate, Candidates, SearchCounts
from unisono.planner.prediction import prediction_of
from unisono.planner.run_choices import RunModel
from unisono.planner.transformer import Transformer
from unisono.planner.workload import Workload

if TYPE_CHECKING:
    from concurrent.futures import Executor


class _Option(NamedTuple):
    """A combination with its lower bound. `open_layout` has no interleaving yet: making a layout
    of each combination takes longer than skipping it."""

    bound_s: float
    open_layout: Layout
    chunks: int
    micro_batch: int
    recompute: str

    @property
    def layout(self) -> Layout:
        return replace(self.open_layout, vpp=self.chunks)


class _Found(NamedTuple):
    best: list[tuple[float, _Option, dict[str, float]]]
    counts: SearchCounts


def search(
    model: Transformer,
    cluster: Cluster,
    job: Workload,
    *,
    keep: int = 10,
    schedules: Sequence[str] = ("1f1b",),
    executor: Executor | None = None,
    constants: CalibratedConstants | None = None,
) -> Candidates:
    """Finds the `keep` fastest layouts that fit in memory.

    Considers every tp, pp, cp, ep, interleaving, sequence parallelism, ZeRO stage, micro batch and
    recomputation; values that `job` states are kept. Each combination has a lower bound: its
    microbatches times the time of an average stage, with no bubble, exchange of gradients or
    optimizer. Combinations are predicted in the order of their bounds until the bound is over the
    worst time kept, so nothing better is skipped. Of combinations that differ in ZeRO stage only,
    and in nothing that ZeRO changes, the least sharded wins. `executor` (any of
    `concurrent.futures`) divides the work by (tp, pp). Raises ValueError if nothing fits, with the
    smallest layout.

    >>> from unisono import planner
    >>> found = planner.search(
    ...     planner.load_model("gpt3-7.5b"),
    ...     planner.Cluster.parse("a100:16"),
    ...     planner.Workload(seq=2048, global_batch=64),
    ... )
    >>> found[0].prediction.step_s <= found[1].prediction.step_s
    True
    """
    constants = constants or default_constants()
    parts = list(_parts(model, cluster))
    one = partial(_search_part, model, cluster, job, constants, keep, tuple(schedules))
    found = [one(parts)] if executor is None else list(executor.map(one, [[p] for p in parts]))
    best = sorted((each for part in found for each in part.best), key=lambda each: each[0])[:keep]
    run = RunModel(model, cluster, job, constants)
    if not best:
        raise ValueError(_nothing_fits(run, parts))
    counts = _sum_counts([part.counts for part in found])
    return Candidates(entries=_candidates(run, best), counts=counts)


def _sum_counts(counts: Sequence[SearchCounts]) -> SearchCounts:
    names = ("considered", "too_large", "bounded", "predicted")
    return SearchCounts(**{name: sum(getattr(each, name) for each in counts) for name in names})


def _parts(model: Transformer, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Yields (tp, pp)."""
    for tp in _divisors(cluster.devices):
        if model.heads % tp or tp > 2 * cluster.domain:
            continue
        for pp in _divisors(cluster.devices // tp):
            if pp <= model.layers:
                yield tp, pp


def _search_part(
    model: Transformer,
    cluster: Cluster,
    job: Workload,
    constants: CalibratedConstants,
    keep: int,
    schedules: tuple[str, ...],
    parts: Sequence[tuple[int, int]],
) -> _Found:
    run = RunModel(model, cluster, job, constants)
    options = [
        option for tp, pp in parts for option in _options(run, tp=tp, pp=pp, schedules=schedules)
    ]
    options.sort(key=lambda option: option.bound_s)
    best: list[tuple[float, _Option, dict[str, float]]] = []
    too_large = predicted = 0
    for number, option in enumerate(options):
        if len(best) == keep and option.bound_s >= best[-1][0]:
            rest = len(options) - number
            break
        layout = option.layout
        nbytes = run.memory.fullest_bytes(layout, option.micro_batch, option.recompute)
        if nbytes > run.capacity_bytes:
            too_large += 1
            continue
        kinds = run.times.step(layout, option.micro_batch, option.recompute)
        predicted += 1
        best.append((sum(kinds.values()), option, kinds))
        best.sort(key=lambda each: each[0])
        del best[keep:]
    else:
        rest = 0
    counts = SearchCounts(
        considered=len(options), too_large=too_large, bounded=rest, predicted=predicted
    )
    return _Found(best, counts)


def _options(run: RunModel, *, tp: int, pp: int, schedules: tuple[str, ...]) -> Iterator[_Option]:
    """Yields the combinations of one (tp, pp), each with its lower bound."""
    model, job = run.model, run.workload
    replicas = run.cluster.devices // (tp * pp)
    for cp in _context_sizes(job.seq, replicas, tp):
        dp = replicas // cp
        if job.global_batch % dp:
            continue
        micro_batches = run.micro_batches(job.global_batch // dp)
        experts = [
            ep
            for ep in (_divisors(model.experts) if model.experts else [1])
            if (dp * cp * tp) % ep == 0
        ]
        for ep, split, zero, schedule in product(
            experts, (False, True) if tp > 1 else (False,), _zero_stages(pp, dp * cp), schedules
        ):
            if split and job.seq % (cp * tp):
                continue
            layout = Layout(
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
            yield from _open_options(run, layout, micro_batches)


def _open_options(run: RunModel, layout: Layout, micro_batches: Sequence[int]) -> Iterator[_Option]:
    experts = run.model.moe_layers == run.model.layers
    share = run.model.layers / layout.pp
    per_replica = run.workload.global_batch // layout.dp
    for micro_batch in micro_batches:
        microbatches = per_replica // micro_batch
        chunk_counts = run.chunk_counts(layout, microbatches)
        for recompute in run.recomputations():
            layer = run.times.layer_step(layout, micro_batch, recompute, experts=experts)
            bound_s = microbatches * share * sum(layer)
            if run.model.moe_layers not in (0, run.model.layers):
                other = run.times.layer_step(layout, micro_batch, recompute, experts=True)
                bound_s = microbatches * share * min(sum(layer), sum(other))
            for chunks in chunk_counts:
                yield _Option(bound_s, layout, chunks, micro_batch, recompute)


def _zero_stages(pp: int, shards: int) -> tuple[int, ...]:
    """Returns the stages to try. Pipelines stop at 1, as 2 and 3 exchange in each microbatch."""
    if shards == 1:
        return (0,)
    return (0, 1, 2, 3) if pp == 1 else (0, 1)


def _context_sizes(seq: int, replicas: int, tp: int) -> list[int]:
    """Returns the powers of two that leave each device at least 1,024 positions."""
    sizes, size = [], 1
    while replicas % size == 0 and (size == 1 or seq // size >= 1024) and seq % size == 0:
        sizes.append(size)
        size *= 2
    return sizes


def _candidates(
    run: RunModel, best: Sequence[tuple[float, _Option, dict[str, float]]]
) -> tuple[Candidate, ...]:
    found = []
    for place, (step_s, option, kinds) in enumerate(best):
        prediction = prediction_of(run, option.layout, option.micro_batch, option.recompute, kinds)
        lost = ""
        if place + 1 < len(best):
            lost = _difference(step_s, kinds, best[place + 1][0], best[place + 1][2])
        found.append(
            Candidate(
                layout=prediction.layout, job=prediction.job, prediction=prediction, next_lost=lost
            )
        )
    return tuple(found)


def _difference(
    step_s: float, kinds: dict[str, float], next_s: float, next_kinds: dict[str, float]
) -> str:
    """Returns the kinds of time that differ most in the next candidate, largest difference first.

    >>> _difference(1.0, {"bubble": 0.1, "matmul": 0.9}, 1.5, {"bubble": 0.8, "matmul": 0.7})
    '+0.5 s: bubble +0.7 s, matmul -0.2 s'
    """
    changes = {kind: next_kinds[kind] - seconds for kind, seconds in kinds.items()}
    largest = sorted(changes, key=lambda kind: -abs(changes[kind]))[:3]
    threshold = 0.02 * max(abs(changes[largest[0]]), 1e-12)
    parts = [f"{kind} {changes[kind]:+.3g} s" for kind in largest if abs(changes[kind]) > threshold]
    return f"{next_s - step_s:+.3g} s" + (f": {', '.join(parts)}" if parts else "")


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _nothing_fits(run: RunModel, parts: Sequence[tuple[int, int]]) -> str:
    options = [
        option for tp, pp in parts for option in _options(run, tp=tp, pp=pp, schedules=("1f1b",))
    ]
    if not options:
        return (
            f"no layout of {run.cluster.devices} devices divides {run.model.heads} heads and a "
            f"batch of {run.workload.global_batch}"
        )
    sizes = [
        (run.memory.fullest_bytes(option.layout, option.micro_batch, option.recompute), option)
        for option in options
    ]
    nbytes, smallest = min(sizes, key=lambda each: each[0])
    return (
        f"nothing fits: {smallest.layout.text()} with micro batch {smallest.micro_batch} and "
        f"recompute {smallest.recompute} needs least, {nbytes / 1e9:.1f} GB, and a device has "
        f"{run.capacity_bytes / 1e9:.1f} GB for training; more devices or a smaller model fit"
    )

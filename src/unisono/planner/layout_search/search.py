"""The exact search for the best layouts. It skips only layouts that cannot be among the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import merge
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from unisono.planner.constants.calibrated_constants import CalibratedConstants, default_constants
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.whole_numbers import whole_number
from unisono.planner.inputs.workload import Workload
from unisono.planner.layout_search.candidate_comparison import reason_of_loss
from unisono.planner.layout_search.layout_candidates import Candidate, Candidates, SearchCounts
from unisono.planner.layout_search.layout_options import (
    LayoutOption,
    OptionRequest,
    layout_options,
    tensor_pipeline_sizes,
)
from unisono.planner.layout_search.parallel_calls import results_of
from unisono.planner.own_measurements.calibration import Calibration
from unisono.planner.positive_values import require_positive
from unisono.planner.prediction import prediction_of
from unisono.planner.run_model import RunModel
from unisono.planner.stated_inputs import (
    require_executor,
    require_workload,
    stated_cluster,
    stated_model,
)

if TYPE_CHECKING:
    from unisono.launch import Executor

OBJECTIVES = ("time", "cost", "devices", "memory")
"""Objectives that a search minimises: seconds of a step; device seconds of a step; devices, then
time; bytes of the fullest device, then time."""


class FoundLayout(NamedTuple):
    """A combination that fits in memory, and its step time by kind. A better combination has a
    smaller `key`.
    """

    key: tuple[float, ...]
    devices: int
    option: LayoutOption
    kinds: dict[str, float]

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.kinds.values())


class _Found(NamedTuple):
    best: list[FoundLayout]
    counts: SearchCounts


@dataclass(frozen=True, kw_only=True)
class SearchRequest(OptionRequest):
    """The training, the objective and the limits of a search."""

    keep: int
    objective: str
    longest_s: float


def search(
    model: Transformer | str,
    cluster: Cluster | str,
    job: Workload,
    *,
    objective: str = "time",
    longest_s: float | None = None,
    keep: int = 10,
    schedules: Sequence[str] = ("1f1b",),
    executor: Executor | None = None,
    constants: CalibratedConstants | None = None,
    calibration: Calibration | None = None,
) -> Candidates:
    """Finds the `keep` best layouts that fit in memory.

    `objective`: the shortest "time" of a step; the least "cost", which is the product of time and
    devices; the fewest "devices"; or the least "memory" of the fullest device. "cost" and "devices"
    also consider parts of the cluster (`smaller_clusters`). `longest_s` is the longest step that is
    accepted.

    Considers every tp, pp, cp, ep, interleaving, sequence parallelism, ZeRO stage, micro batch and
    recomputation; values that `job` states are kept. Each combination has a lower bound: its
    microbatches times the time of an average stage, with no bubble, exchange of gradients or
    optimizer. Combinations are predicted in the order of their bounds until the bound is over the
    worst time kept, so nothing better is skipped. Of combinations that differ only in the ZeRO
    stage and have equal times, the lowest stage wins. An `executor`, as for `unisono.run`, runs the
    work in parallel, divided by devices and (tp, pp); the result is the same. Raises ValueError if
    no layout fits; the message has the layout with the least memory, or the shortest step if
    `longest_s` excludes it. The model and the cluster may be texts of the command line.

    >>> from unisono import planner
    >>> found = planner.search(
    ...     planner.load_model("gpt3-7.5b"),
    ...     planner.Cluster.parse("a100:16"),
    ...     planner.Workload(seq=2048, global_batch=64),
    ... )
    >>> found[0].prediction.step_s <= found[1].prediction.step_s
    True
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, not {objective!r}")
    model, cluster = stated_model(model), stated_cluster(cluster)
    require_workload(job)
    require_executor(executor)
    keep = whole_number("keep", keep)
    if longest_s is not None:
        require_positive({"longest_s": longest_s})
    request = SearchRequest(
        model=model,
        job=job,
        constants=constants or default_constants(),
        calibration=calibration,
        schedules=tuple(schedules),
        keep=keep,
        objective=objective,
        longest_s=inf if longest_s is None else longest_s,
    )
    clusters = smaller_clusters(cluster) if objective in ("cost", "devices") else [cluster]
    found = _searched(request, clusters, executor)
    best = list(islice(merge(*(part.best for part in found), key=lambda each: each.key), keep))
    if not best:
        raise ValueError(_nothing_found(request, clusters))
    counts = _sum_counts([part.counts for part in found])
    return Candidates(entries=_candidates(request, clusters, best), counts=counts)


def smaller_clusters(cluster: Cluster) -> list[Cluster]:
    """Returns the cluster, then ever smaller parts of it: half of its devices, half of those, and
    so on to 1 device.

    Odd numbers are divided by their smallest factor. A cluster with a topology has no parts.

    >>> [each.devices for each in smaller_clusters(Cluster.parse("a100:24"))]
    [24, 12, 6, 3, 1]
    """
    found = [cluster]
    while found[-1].devices > 1 and cluster.topology is None:
        number = found[-1].devices
        factor = next(d for d in range(2, number + 1) if number % d == 0)
        found.append(replace(cluster, devices=number // factor))
    return found


def _searched(
    request: SearchRequest, clusters: Sequence[Cluster], executor: Executor | None
) -> list[_Found]:
    tasks = [(each, tensor_pipeline_sizes(request.model, each)) for each in clusters]
    if executor is None:
        return [_search_part(request, each, sizes) for each, sizes in tasks]
    parts = [(each, [size]) for each, sizes in tasks for size in sizes]
    return results_of(partial(_search_part, request), parts, executor)


def _sum_counts(counts: Sequence[SearchCounts]) -> SearchCounts:
    names = ("considered", "too_large", "bounded", "predicted")
    return SearchCounts(**{name: sum(getattr(each, name) for each in counts) for name in names})


def _search_part(
    request: SearchRequest, cluster: Cluster, sizes: Sequence[tuple[int, int]]
) -> _Found:
    """Searches the combinations of some pairs (tp, pp) on one cluster."""
    run = request.run(cluster)
    options = layout_options(request, run, sizes)
    by_memory = request.objective == "memory"
    return (_least_memory if by_memory else _least_time)(request, run, options)


def _least_time(request: SearchRequest, run: RunModel, options: Sequence[LayoutOption]) -> _Found:
    best: list[FoundLayout] = []
    too_large = predicted = reached = 0
    limit_s = request.longest_s
    for option in options:
        if option.bound_s > limit_s:
            break
        reached += 1
        if not option.fits(run):
            too_large += 1
            continue
        kinds = run.step(option.layout, option.micro_batch, option.recompute)
        predicted += 1
        step_s = sum(kinds.values())
        if step_s > limit_s:
            continue
        best.append(_found_layout(request, run, option, kinds, step_s))
        if len(best) > request.keep:
            best.sort(key=lambda each: each.key)
            best.pop()
        if len(best) == request.keep:
            limit_s = max(each.step_s for each in best)
    best.sort(key=lambda each: each.key)
    return _Found(best, _counts(len(options), too_large, predicted, reached))


def _least_memory(request: SearchRequest, run: RunModel, options: Sequence[LayoutOption]) -> _Found:
    sizes = [(option.memory_bytes(run), option) for option in options]
    fitting = [each for each in sizes if each[0] <= run.capacity_bytes]
    fitting.sort(key=lambda each: each[0])
    best: list[FoundLayout] = []
    predicted = 0
    for nbytes, option in fitting:
        if len(best) >= request.keep and nbytes > best[request.keep - 1].key[0]:
            break
        if option.bound_s > request.longest_s:
            continue
        kinds = run.step(option.layout, option.micro_batch, option.recompute)
        predicted += 1
        if sum(kinds.values()) <= request.longest_s:
            key = (nbytes, sum(kinds.values()), run.cluster.devices, *option.place)
            best.append(FoundLayout(key, run.cluster.devices, option, kinds))
            best.sort(key=lambda each: each.key)
    too_large = len(options) - len(fitting)
    counts = _counts(len(options), too_large, predicted, too_large + predicted)
    return _Found(best[: request.keep], counts)


def _found_layout(
    request: SearchRequest,
    run: RunModel,
    option: LayoutOption,
    kinds: dict[str, float],
    step_s: float,
) -> FoundLayout:
    devices = run.cluster.devices
    first = {"time": step_s, "cost": devices * step_s, "devices": devices}[request.objective]
    key = (first, step_s, devices, option.bound_s, *option.place)
    return FoundLayout(key, devices, option, kinds)


def _counts(considered: int, too_large: int, predicted: int, reached: int) -> SearchCounts:
    return SearchCounts(
        considered=considered,
        too_large=too_large,
        bounded=considered - reached,
        predicted=predicted,
    )


def _candidates(
    request: SearchRequest, clusters: Sequence[Cluster], best: Sequence[FoundLayout]
) -> tuple[Candidate, ...]:
    runs: dict[int, RunModel] = {}
    found = []
    for place, each in enumerate(best):
        if each.devices not in runs:
            runs[each.devices] = request.run(
                next(cluster for cluster in clusters if cluster.devices == each.devices)
            )
        option = each.option
        prediction = prediction_of(
            runs[each.devices], option.layout, option.micro_batch, option.recompute, each.kinds
        )
        lost = ""
        if place + 1 < len(best):
            lost = reason_of_loss(
                request.objective,
                each.key[0],
                each.kinds,
                best[place + 1].key[0],
                best[place + 1].kinds,
            )
        found.append(
            Candidate(
                layout=prediction.layout, job=prediction.job, prediction=prediction, next_lost=lost
            )
        )
    return tuple(found)


def _nothing_found(request: SearchRequest, clusters: Sequence[Cluster]) -> str:
    """Returns what lacks: time, memory, or a layout that divides the model."""
    cluster = clusters[0]
    if request.longest_s < inf:
        fastest = replace(request, keep=1, objective="time", longest_s=inf)
        found = [each for part in _searched(fastest, clusters, None) for each in part.best]
        if found:
            best = min(found, key=lambda each: each.key)
            return (
                f"no step takes {request.longest_s:.4g} s or less; the shortest takes "
                f"{best.step_s:.4g} s ({best.option.layout.text()} on {best.devices})"
            )
    run = request.run(cluster)
    sizes = tensor_pipeline_sizes(request.model, cluster)
    options = layout_options(request, run, sizes)
    if not options:
        return (
            f"no layout of {cluster.devices} devices divides {request.model.heads} heads and a "
            f"batch of {request.job.global_batch}"
        )
    nbytes, smallest = min(
        ((option.memory_bytes(run), option) for option in options), key=lambda each: each[0]
    )
    return (
        f"nothing fits: {smallest.layout.text()} with micro batch {smallest.micro_batch} and "
        f"recompute {smallest.recompute} needs least, {nbytes / 1e9:.1f} GB, and a device has "
        f"{run.capacity_bytes / 1e9:.1f} GB for training; more devices or a smaller model fit"
    )

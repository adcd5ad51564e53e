"""The exact search for the best layouts. It skips only layouts that cannot be among the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush, merge
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from unisono.planner.constants.calibrated_constants import CalibratedConstants, default_constants
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.whole_numbers import whole_number
from unisono.planner.inputs.workload import Workload
from unisono.planner.layout_evaluation import RunModel
from unisono.planner.layout_search.layout_candidates import Candidates, SearchCounts
from unisono.planner.layout_search.layout_rows import FoundLayout, candidate_rows, row_of
from unisono.planner.layout_search.out_of_memory import nothing_fits_text
from unisono.planner.layout_search.parallel_calls import results_of
from unisono.planner.layout_search.search_space import (
    HEADROOM,
    LayoutOption,
    OptionGroup,
    OptionRequest,
    layout_options,
    option_groups,
    tensor_pipeline_sizes,
)
from unisono.planner.own_measurements.calibration import Calibration
from unisono.planner.positive_values import require_positive
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


class _Found(NamedTuple):
    best: list[FoundLayout]
    counts: SearchCounts


@dataclass(frozen=True, kw_only=True)
class SearchRequest(OptionRequest):
    """The training, the objective and the limits of a search."""

    keep: int
    objective: str
    longest_s: float
    folded: bool


def search(
    model: Transformer | str,
    cluster: Cluster | str,
    job: Workload,
    *,
    objective: str = "time",
    longest_s: float | None = None,
    headroom: float = HEADROOM,
    keep: int = 10,
    folded: bool = True,
    schedules: Sequence[str] = ("1f1b",),
    executor: Executor | None = None,
    constants: CalibratedConstants | None = None,
    calibration: Calibration | None = None,
) -> Candidates:
    """Finds the `keep` best layouts that fit in memory, one for each (tp, pp, cp, ep).

    A row is the best of its variants: those with the same devices, tp, pp, cp and ep, and with
    other micro batches, recomputation, ZeRO stages, replicas of the shards, sequence parallelism,
    interleaving or schedules. `Candidate.alternatives` says what other settings of a row cost.
    With `folded=False`, each variant is a candidate.

    `objective`: the shortest "time" of a step; the least "cost", which is the product of time and
    devices; the fewest "devices"; or the least "memory" of the fullest device. "cost" and "devices"
    also consider parts of the cluster (`smaller_clusters`). `longest_s` is the longest step that is
    accepted. Layouts leave `headroom` free, a share of the capacity, because the predicted memory
    has an error, and because samples and experts are uneven in real training. If no layout does,
    all layouts that fit are considered. The objective "memory" ignores it.

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
    if not 0 <= headroom < 1:
        raise ValueError(
            f"headroom must be at least 0 and under 1, not {headroom:g}: a share of the memory"
        )
    request = SearchRequest(
        model=model,
        job=job,
        constants=constants or default_constants(),
        calibration=calibration,
        schedules=tuple(schedules),
        keep=keep,
        objective=objective,
        longest_s=inf if longest_s is None else longest_s,
        folded=folded,
        headroom=headroom,
    )
    clusters = smaller_clusters(cluster) if objective in ("cost", "devices") else [cluster]
    found = _searched(request, clusters, executor)
    if headroom and not any(part.best for part in found):
        request = replace(request, headroom=0.0)
        found = _searched(request, clusters, executor)
    best = list(islice(merge(*(part.best for part in found), key=lambda each: each.key), keep))
    if not best:
        raise ValueError(_nothing_found(request, clusters))
    counts = _sum_counts([part.counts for part in found])
    rows = candidate_rows(request, objective, clusters, best, folded=folded)
    return Candidates(entries=rows, counts=counts, objective=objective)


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
    if request.objective == "memory":
        return _least_memory(request, run, layout_options(request, run, sizes))
    return _least_time(request, run, list(option_groups(request, run, sizes)))


def _least_time(request: SearchRequest, run: RunModel, groups: list[OptionGroup]) -> _Found:
    # Groups that no bound excludes are replaced by their options.
    waiting: list[OptionGroup | LayoutOption] = [*groups]
    heapify(waiting)
    best: dict[object, FoundLayout] = {}
    too_large = predicted = reached = 0
    limit_s = request.longest_s
    while waiting and waiting[0].bound_s <= limit_s:
        option = heappop(waiting)
        row = row_of(option) if request.folded else option.place
        known = best.get(row)
        if known is not None and option.bound_s >= known.step_s:
            continue
        if isinstance(option, OptionGroup):
            for each in option.options():
                heappush(waiting, each)
            continue
        reached += 1
        if not option.fits(run, request.headroom):
            too_large += 1
            continue
        kinds = run.step(option.layout, option.micro_batch, option.recompute)
        predicted += 1
        step_s = sum(kinds.values())
        if step_s > limit_s:
            continue
        found = _found_layout(request, run, option, kinds, step_s)
        if known is None or found.key < known.key:
            best[row] = found
            if len(best) > request.keep:
                del best[max(best, key=lambda each: best[each].key)]
            if len(best) == request.keep:
                limit_s = max(each.step_s for each in best.values())
    considered = sum(len(each.counts) * len(each.recomputations) for each in groups)
    counts = _counts(considered, too_large, predicted, reached)
    return _Found(sorted(best.values(), key=lambda each: each.key), counts)


def _least_memory(request: SearchRequest, run: RunModel, options: Sequence[LayoutOption]) -> _Found:
    sizes = [(option.memory_bytes(run), option) for option in options]
    fitting = [each for each in sizes if each[0] <= run.capacity_bytes]
    fitting.sort(key=lambda each: each[0])
    best: dict[object, FoundLayout] = {}
    predicted, limit_bytes = 0, inf
    for nbytes, option in fitting:
        if nbytes > limit_bytes:
            break
        row = row_of(option) if request.folded else option.place
        known = best.get(row)
        if option.bound_s > request.longest_s or (known is not None and known.key[0] < nbytes):
            continue
        kinds = run.step(option.layout, option.micro_batch, option.recompute)
        predicted += 1
        step_s = sum(kinds.values())
        key = (nbytes, step_s, run.cluster.devices, *option.place)
        if step_s <= request.longest_s and (known is None or key < known.key):
            best[row] = FoundLayout(key, run.cluster.devices, option, kinds)
            if len(best) >= request.keep:
                limit_bytes = sorted(each.key[0] for each in best.values())[request.keep - 1]
    too_large = len(options) - len(fitting)
    counts = _counts(len(options), too_large, predicted, too_large + predicted)
    return _Found(sorted(best.values(), key=lambda each: each.key)[: request.keep], counts)


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
    return nothing_fits_text(request, cluster)

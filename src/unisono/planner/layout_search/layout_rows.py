"""The rows of a search's result: layouts that differ, each the best of its variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.layout_evaluation import RunModel
from unisono.planner.layout_search.candidate_comparison import reason_of_loss
from unisono.planner.layout_search.layout_candidates import Alternative, Candidate
from unisono.planner.layout_search.search_space import (
    LayoutOption,
    OptionGroup,
    OptionRequest,
    layout_options,
)
from unisono.planner.prediction import prediction_of


class FoundLayout(NamedTuple):
    """A combination that fits in memory, and its step time by kind. A better combination has a
    smaller `key`, whose second entry is the step time.
    """

    key: tuple[float, ...]
    devices: int
    option: LayoutOption
    kinds: dict[str, float]

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.key[1]


_SETTINGS: Mapping[str, Callable[[LayoutOption], Any]] = {
    "micro": lambda option: option.micro_batch,
    "recompute": lambda option: option.recompute,
    "zero": lambda option: option.open_layout.layout.zero,
    "replicas": lambda option: option.open_layout.layout.dp_replicate,
    "sp": lambda option: int(option.open_layout.layout.sequence_parallel),
    "vpp": lambda option: option.chunks,
    "schedule": lambda option: option.open_layout.layout.schedule,
}
"""The settings in which the variants of a row differ."""


def row_of(option: LayoutOption | OptionGroup) -> tuple[int, int, int, int]:
    """Returns the axes that all variants of a row share. dp follows from the devices."""
    layout = option.open_layout.layout
    return layout.tp, layout.pp, layout.cp, layout.ep


def candidate_rows(
    request: OptionRequest,
    objective: str,
    clusters: Sequence[Cluster],
    best: Sequence[FoundLayout],
    *,
    folded: bool,
) -> tuple[Candidate, ...]:
    """Returns the candidates of a search, with the reason why each next one is worse, the chance
    that it is better than the first one, and its alternatives.
    """
    by_devices = {cluster.devices: cluster for cluster in clusters}
    runs = {devices: request.run(by_devices[devices]) for devices in {e.devices for e in best}}
    found: list[Candidate] = []
    for place, each in enumerate(best):
        option, run = each.option, runs[each.devices]
        prediction = prediction_of(
            run, option.layout, option.micro_batch, option.recompute, each.kinds
        )
        lost = ""
        if place + 1 < len(best):
            after = best[place + 1]
            lost = reason_of_loss(objective, each.key[0], each.kinds, after.key[0], after.kinds)
        others: tuple[Alternative, ...] = ()
        if folded:
            tp, pp, *inner = row_of(option)
            variants = layout_options(request, run, [(tp, pp)], (inner[0], inner[1]))
            others = alternatives(run, variants, each, request.headroom)
        first = found[0].prediction if found else prediction
        found.append(
            Candidate(
                layout=prediction.layout,
                job=prediction.job,
                prediction=prediction,
                next_lost=lost,
                chance=prediction.chance_against(first, with_cost=objective == "cost"),
                alternatives=others,
            )
        )
    return tuple(found)


def alternatives(
    run: RunModel, options: Sequence[LayoutOption], best: FoundLayout, headroom: float
) -> tuple[Alternative, ...]:
    """Returns the fastest variant of a row for each setting with another value than in the best
    variant, fastest first. `options` are those of the row, sorted by their bounds.
    """
    mine = {name: value(best.option) for name, value in _SETTINGS.items()}
    differ = [
        name
        for name, value in _SETTINGS.items()
        if any(value(option) != mine[name] for option in options)
    ]
    found: dict[str, Alternative] = {}
    slowest = float("inf")
    for option in options:
        if option.bound_s > slowest:
            break
        others = {n: v for n in differ if (v := _SETTINGS[n](option)) != mine[n]}
        if not others or not option.fits(run, headroom):
            continue
        step_s = sum(run.step(option.layout, option.micro_batch, option.recompute).values())
        for name, value in others.items():
            if name not in found or step_s < found[name].step_s:
                found[name] = Alternative(name, f"{name} {value}", step_s)
        if len(found) == len(differ):
            slowest = max(each.step_s for each in found.values())
    return tuple(sorted(found.values(), key=lambda each: each.step_s))

"""Torch's pipeline schedules: the class of a layout, its conditions, and its passes as data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import nn
from torch.distributed import pipelining

from unisono.parallel.run.model_checks import need_torch
from unisono.parallel.run.pipeline.model_stages import stage_count, stages_of_rank
from unisono.pipeline import (
    PipelineSchedule,
    StageMessage,
    StageTask,
    StageTimes,
    TaskGroup,
    TaskRun,
    TaskSpan,
    run_tasks,
    stage_tasks,
)
from unisono.planner import Layout

_KINDS = ("F", "B", "I", "W")


def tasks_of(schedule: Any) -> list[list[TaskGroup]]:
    """Returns the tasks of each rank, in order, of a schedule of `torch.distributed.pipelining`.

    The schedule must have several stages per rank, or be a zero-bubble schedule. In torch 2.13,
    `pipeline_order` of 1F1B with one stage per rank has wrong numbers for the last rank.
    """
    order = schedule.pipeline_order
    groups = {rank: (_group(action) for action in order[rank] if action) for rank in order}
    return [[group for group in groups[rank] if group] for rank in sorted(order)]


def _group(action: Any) -> TaskGroup:
    """Returns the passes of an action of torch; none for an action that only sums gradients."""
    actions = action.sub_actions or (action,)
    kinds = [(each.computation_type.value, each) for each in actions]
    return tuple(
        StageTask(kind, each.microbatch_index, each.stage_index)
        for kind, each in kinds
        if kind in _KINDS
    )


def run_equal_passes(tasks: Sequence[Sequence[TaskGroup]]) -> TaskRun:
    """Simulates tasks: forward passes, input gradients and weight gradients take 1 s each.

    A whole backward pass computes both gradients, so it takes 2 s.
    """
    return run_tasks(tasks, lambda task: 2.0 if task.kind == "B" else 1.0)


def run_like(tasks: Sequence[Sequence[TaskGroup]], measured: Sequence[TaskSpan]) -> TaskRun:
    """Simulates tasks, each with the median time of the measured tasks of its kind."""
    times: dict[str, list[float]] = {}
    for task, begin_s, end_s in measured:
        times.setdefault(task.kind, []).append(end_s - begin_s)
    return run_tasks(tasks, lambda task: median(times[task.kind]))


def pipeline_schedule(
    layout: Layout,
    *,
    microbatches: int,
    forward_s: float = 1e-3,
    backward_s: float = 2e-3,
    weight_share: float = 0.5,
    activation_bytes: float = 0.0,
) -> PipelineSchedule:
    """Returns a layout's pipeline schedule as data, with equal stages. Needs no process group.

    `forward_s` and `backward_s` are the seconds of one microbatch on a rank, over all stages of the
    rank.
    `weight_share` is the fraction of `backward_s` in which weight gradients are computed.
    `activation_bytes` is the size of the message from a stage to the next for each microbatch; the
    gradients that return have the same size. Raises ValueError for a number of microbatches that
    the schedule cannot run.

    >>> from unisono.parallel import Layout, pipeline_schedule
    >>> schedule = pipeline_schedule(Layout(pp=2), microbatches=2)
    >>> schedule.to_document()["ranks"]
    [['0F0', '0F1', '0B0', '0B1'], ['1F0', '1B0', '1F1', '1B1']]
    """
    check_microbatches(layout, microbatches)
    chunks = len(stages_of_rank(layout, 0))
    return PipelineSchedule.of(
        layout.schedule,
        pipeline_tasks(layout, microbatches),
        forward_s=forward_s / chunks,
        backward_s=backward_s / chunks,
        weight_share=weight_share,
        activation_bytes=activation_bytes,
    )


def pipeline_tasks(layout: Layout, microbatches: int) -> list[list[TaskGroup]]:
    """Returns the forward and backward passes of each rank of a pipeline, in order.

    Raises `ValueError` for a number of microbatches that the schedule cannot run.
    """
    check_microbatches(layout, microbatches)
    if is_single(layout):
        return stage_tasks(layout.schedule, stages=layout.pp, microbatches=microbatches)
    need_torch(f"schedule = {layout.schedule}", "schedule = gpipe")
    stages = [_StagePlace(stage, layout) for stage in stages_of_rank(layout, 0)]
    return tasks_of(schedule_class(layout)(stages, microbatches))


@dataclass
class _StagePlace:
    """The attributes of a stage of rank 0 from which torch computes the order of all ranks."""

    stage_index: int
    layout: Layout
    submod: nn.Module = field(default_factory=nn.Identity)
    group_rank = 0

    @property
    def group_size(self) -> int:
        return self.layout.pp

    @property
    def num_stages(self) -> int:
        return stage_count(self.layout)


def check_count(microbatches: int) -> None:
    """Raises `ValueError` for a number of microbatches below 1."""
    if microbatches < 1:
        raise ValueError(f"microbatches: expected at least 1, got {microbatches}")


def check_microbatches(layout: Layout, microbatches: int) -> None:
    """Raises `ValueError` if the layout's schedule cannot run this number of microbatches."""
    check_count(microbatches)
    pp = layout.pp
    if pp == 1:
        return
    rules, torch_schedule = layout.rules, layout.rules.torch_schedule(layout.chunks)
    needed = max(1, pp * max(rules.least_rounds, torch_schedule.least_rounds))
    if microbatches < needed:
        raise ValueError(
            f"the schedule {layout.schedule} with pp = {pp} needs at least {needed} microbatches, "
            f"not {microbatches}; pass microbatches={needed}"
        )
    rounds = max(1, microbatches // pp)
    if torch_schedule.whole_rounds and microbatches % rounds:
        raise ValueError(
            f"the schedule {layout.schedule} with pp = {pp} needs a multiple of {rounds} "
            f"microbatches, not {microbatches}; {rounds * pp} works"
        )


def is_single(layout: Layout) -> bool:
    """Returns True if torch's class for the schedule takes one stage per rank, not a list."""
    return layout.rules.single is not None and layout.chunks == 1


def schedule_class(layout: Layout) -> Any:
    """Returns torch's class for a layout's schedule."""
    return getattr(pipelining, layout.rules.torch_schedule(layout.chunks).name)


MessageBytes = tuple[int, int]
"""Bytes of a stage's results, and of the results that need a gradient, for one microbatch."""


def measured_schedule(
    name: str,
    tasks: Sequence[Sequence[TaskGroup]],
    spans: Sequence[TaskSpan],
    result_bytes: Mapping[int, MessageBytes],
) -> PipelineSchedule:
    """Returns a schedule with the median time of each stage's passes, and the stages' messages.

    `spans`: the measured passes, in seconds. `result_bytes`: the bytes that each stage sends to the
    next stage. Half of the time of a whole backward pass counts for the gradients of inputs, and
    half for those of weights.
    """
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for task, begin_s, end_s in spans:
        times[task.stage, task.kind].append(end_s - begin_s)
    count = 1 + max(stage for stage, _ in times)
    messages = []
    for stage in range(count - 1):
        activation, gradient = result_bytes[stage]
        for kind, a, b, size in (
            ("activation", stage, stage + 1, activation),
            ("gradient", stage + 1, stage, gradient),
        ):
            messages.append(StageMessage(kind=kind, from_stage=a, to_stage=b, nbytes=size))
    return PipelineSchedule(
        name=name,
        stages=tuple(_stage_times(times, stage) for stage in range(count)),
        messages=tuple(messages),
        ranks=tuple(map(tuple, tasks)),
    )


def _stage_times(times: Mapping[tuple[int, str], list[float]], stage: int) -> StageTimes:
    half_s = median(times.get((stage, "B"), [0.0])) / 2
    return StageTimes(
        forward_s=median(times[stage, "F"]),
        input_gradient_s=median(times.get((stage, "I"), [half_s])),
        weight_gradient_s=median(times.get((stage, "W"), [half_s])),
    )

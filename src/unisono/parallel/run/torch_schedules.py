"""Torch's pipeline schedule of a layout: its class, its conditions, and its passes as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed import pipelining

from unisono.parallel.run.model_stages import stage_count, stages_of_rank
from unisono.parallel.run.schedule_tasks import tasks_of
from unisono.parallel.run.torch_features import need_torch
from unisono.pipeline import PipelineSchedule, TaskGroup, stage_tasks
from unisono.planner import Layout


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

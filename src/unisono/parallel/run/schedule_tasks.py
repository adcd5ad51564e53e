"""The tasks of torch's pipeline schedules as data."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from unisono.pipeline import StageTask, TaskGroup, TaskRun, TaskSpan, run_tasks

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

"""Runs of pipeline schedules with given times: the oracle of the planner's closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.pipeline import StageTask, run_tasks, stage_tasks


@dataclass(frozen=True, kw_only=True)
class ScheduleRun:
    """The result of running a schedule."""

    makespan_s: float
    kept: tuple[int, ...]
    """Largest number of chunks (one group of layers in one microbatch) whose activations each rank
    keeps."""


def run_schedule(
    schedule: str,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    microbatches: int,
    chunks: int = 1,
    send_s: float = 0.0,
) -> ScheduleRun:
    """Runs a schedule. `forward_s` and `backward_s` are the times of one microbatch on each rank,
    all chunks together. Half of the backward time is for weight gradients.
    """
    stages = len(forward_s)
    orders = stage_tasks(schedule, stages=stages, microbatches=microbatches, chunks=chunks)

    def seconds(task: StageTask) -> float:
        rank = task.stage % stages
        whole = forward_s[rank] if task.kind == "F" else backward_s[rank]
        return whole / chunks / (2 if task.kind in "IW" else 1)

    kept = tuple(_most_kept([task.kind for (task,) in order]) for order in orders)
    return ScheduleRun(makespan_s=run_tasks(orders, seconds, send_s=send_s).makespan_s, kept=kept)


def _most_kept(kinds: Sequence[str]) -> int:
    """Returns the largest number of chunks, at any time, whose forward pass has run and whose
    backward pass has not.
    """
    kept = most = 0
    for kind in kinds:
        kept += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
        most = max(most, kept)
    return most

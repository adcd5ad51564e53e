"""Pipeline schedules as lists of tasks. A simulation of them gives the times and the number of kept
chunks.

The planner's step times use closed forms of the bubble. This file runs the schedules themselves;
the tests compare both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unisono.planner.pipeline.task_run import StageTask, run_tasks


class PipelineTask(NamedTuple):
    """One task of a stage: forward "F", backward "B", input gradient "I", weight gradient "W"."""

    kind: str
    microbatch: int
    chunk: int


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """The result of running a schedule. Times in seconds."""

    makespan_s: float
    """Seconds from the first task's begin to the last task's end."""
    busy_s: tuple[float, ...]
    """Seconds in which each stage works."""
    kept: tuple[int, ...]
    """Maximum number of chunks (one group of layers in one microbatch) whose activations each stage
    keeps."""

    @property
    def bubble_s(self) -> float:
        """Seconds in which the busiest stage waits."""
        return self.makespan_s - max(self.busy_s)


def stage_tasks(
    schedule: str, *, stages: int, microbatches: int, chunks: int = 1
) -> list[list[PipelineTask]]:
    """Returns the tasks of each stage in their order.

    Schedules: gpipe (Huang et al. 2019), 1f1b and interleaved (Narayanan et al., arXiv 2104.04473,
    with Megatron-LM's warm-up), zb1p (Qi et al., arXiv 2401.10241, ZB-H1). Raises ValueError for
    another schedule, and for interleaving if `microbatches` is not a multiple of `stages`.

    >>> [task.kind for task in stage_tasks("1f1b", stages=2, microbatches=3)[0]]
    ['F', 'F', 'B', 'F', 'B', 'B']
    """
    if schedule not in ("gpipe", "1f1b", "interleaved", "zb1p"):
        raise ValueError(f"no order of tasks is known for the schedule {schedule!r}")
    if chunks > 1 and microbatches % stages:
        raise ValueError(
            f"interleaving needs a multiple of {stages} microbatches, not {microbatches}"
        )
    return [_order(schedule, stage, stages, microbatches, chunks) for stage in range(stages)]


def _order(
    schedule: str, stage: int, stages: int, microbatches: int, chunks: int
) -> list[PipelineTask]:
    total = microbatches * chunks
    forward = [_task("F", i, stages, chunks) for i in range(total)]
    backward = [_task("B", i, stages, chunks) for i in range(total)]
    if schedule == "gpipe":
        return forward + backward
    if chunks == 1:
        warm_up = stages - stage - 1
    else:
        warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
    warm_up = min(warm_up, total)
    if schedule == "zb1p":
        return _split_backward(stage, stages, microbatches)
    found = forward[:warm_up]
    for i in range(total - warm_up):
        found += [forward[warm_up + i], backward[i]]
    return found + backward[total - warm_up :]


def _task(kind: str, index: int, stages: int, chunks: int) -> PipelineTask:
    """Returns the task at an index of the interleaved order. A stage works on `stages` microbatches
    in one chunk, then on the same microbatches in the next chunk.
    """
    if chunks == 1:
        return PipelineTask(kind, index, 0)
    group, inside = divmod(index, stages * chunks)
    chunk, microbatch = divmod(inside, stages)
    if kind == "B":
        chunk = chunks - 1 - chunk
    return PipelineTask(kind, group * stages + microbatch, chunk)


def _split_backward(stage: int, stages: int, microbatches: int) -> list[PipelineTask]:
    """Returns the order of ZB-H1: 1F1B with weight gradients delayed by `stage` microbatches."""
    warm_up = min(stages - stage - 1, microbatches)
    found = [PipelineTask("F", i, 0) for i in range(warm_up)]
    weights = 0
    for i in range(microbatches):
        if warm_up + i < microbatches:
            found.append(PipelineTask("F", warm_up + i, 0))
        found.append(PipelineTask("I", i, 0))
        if i >= stage:
            found.append(PipelineTask("W", weights, 0))
            weights += 1
    return found + [PipelineTask("W", i, 0) for i in range(weights, microbatches)]


def run_schedule(
    schedule: str,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    microbatches: int,
    chunks: int = 1,
    weight_share: float = 0.5,
    send_s: float = 0.0,
) -> PipelineRun:
    """Simulates a schedule. `forward_s` and `backward_s` are the times of one microbatch on each
    stage, all chunks together.

    `weight_share` is the fraction of the backward time in which weight gradients are computed,
    which zb1p delays. `send_s` is the time from the end of a task to the start of its successor on
    the next stage.

    >>> run = run_schedule("1f1b", forward_s=[1.0] * 4, backward_s=[2.0] * 4, microbatches=8)
    >>> run.makespan_s, run.bubble_s, run.kept
    (33.0, 9.0, (4, 3, 2, 1))
    """
    stages = len(forward_s)
    times = list(zip(forward_s, backward_s, strict=True))
    durations = [_durations(f, b, weight_share, chunks) for f, b in times]
    orders = stage_tasks(schedule, stages=stages, microbatches=microbatches, chunks=chunks)
    run = run_tasks(
        [
            [(StageTask(each.kind, each.microbatch, each.chunk * stages + rank),) for each in order]
            for rank, order in enumerate(orders)
        ],
        lambda task: durations[task.stage % stages][task.kind],
        send_s=send_s,
    )
    busy = tuple(microbatches * (f + b) for f, b in times)
    return PipelineRun(makespan_s=run.makespan_s, busy_s=busy, kept=tuple(map(_most_kept, orders)))


def _durations(
    forward_s: float, backward_s: float, weight_share: float, chunks: int
) -> dict[str, float]:
    weight_s = backward_s * weight_share
    whole = {"F": forward_s, "B": backward_s, "W": weight_s, "I": backward_s - weight_s}
    return {kind: seconds / chunks for kind, seconds in whole.items()}


def _most_kept(order: Sequence[PipelineTask]) -> int:
    """Returns the largest number of chunks, at any time, whose forward pass has run and whose
    backward pass has not.
    """
    kept = most = 0
    for task in order:
        if task.kind == "F":
            kept += 1
            most = max(most, kept)
        elif task.kind in ("B", "W"):
            kept -= 1
    return most

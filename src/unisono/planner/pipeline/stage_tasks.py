"""The order of the tasks of each rank in pipeline schedules."""

from __future__ import annotations

from unisono.planner.pipeline.task_run import StageTask, TaskGroup


def stage_tasks(
    schedule: str, *, stages: int, microbatches: int, chunks: int = 1
) -> list[list[TaskGroup]]:
    """Returns the tasks of each rank in their order, one in each group. A rank has `chunks` stages
    of the model: rank r has the stages r, r + `stages`, ...

    Schedules: gpipe (Huang et al. 2019), 1f1b and interleaved (Narayanan et al., arXiv 2104.04473,
    with Megatron-LM's warm-up), zb1p (Qi et al., arXiv 2401.10241, ZB-H1). Raises ValueError for
    another schedule, and for interleaving if `microbatches` is not a multiple of `stages`.

    >>> [task.text for (task,) in stage_tasks("1f1b", stages=2, microbatches=3)[0]]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """
    if schedule not in ("gpipe", "1f1b", "interleaved", "zb1p"):
        raise ValueError(f"no order of tasks is known for the schedule {schedule!r}")
    if chunks > 1 and microbatches % stages:
        raise ValueError(
            f"interleaving needs a multiple of {stages} microbatches, not {microbatches}"
        )
    return [
        [(task,) for task in _order(schedule, rank, stages, microbatches, chunks)]
        for rank in range(stages)
    ]


def _order(
    schedule: str, rank: int, stages: int, microbatches: int, chunks: int
) -> list[StageTask]:
    total = microbatches * chunks
    forward = [_task("F", i, rank, stages, chunks) for i in range(total)]
    backward = [_task("B", i, rank, stages, chunks) for i in range(total)]
    if schedule == "gpipe":
        return forward + backward
    if schedule == "zb1p":
        return _split_backward(rank, stages, microbatches)
    after = stages - rank - 1
    warm_up = min(after if chunks == 1 else 2 * after + (chunks - 1) * stages, total)
    found = forward[:warm_up]
    for i in range(total - warm_up):
        found += [forward[warm_up + i], backward[i]]
    return found + backward[total - warm_up :]


def _task(kind: str, index: int, rank: int, stages: int, chunks: int) -> StageTask:
    """Returns the task at an index of the interleaved order. A rank works on `stages` microbatches
    in one chunk, then on the same microbatches in the next chunk.
    """
    group, inside = divmod(index, stages * chunks)
    chunk, microbatch = divmod(inside, stages)
    if kind == "B":
        chunk = chunks - 1 - chunk
    return StageTask(kind, group * stages + microbatch, chunk * stages + rank)


def _split_backward(rank: int, stages: int, microbatches: int) -> list[StageTask]:
    """Returns the order of ZB-H1: 1F1B with weight gradients delayed by `rank` microbatches."""
    warm_up = min(stages - rank - 1, microbatches)
    found = [StageTask("F", i, rank) for i in range(warm_up)]
    weights = 0
    for i in range(microbatches):
        if warm_up + i < microbatches:
            found.append(StageTask("F", warm_up + i, rank))
        found.append(StageTask("I", i, rank))
        if i >= rank:
            found.append(StageTask("W", weights, rank))
            weights += 1
    return found + [StageTask("W", i, rank) for i in range(weights, microbatches)]

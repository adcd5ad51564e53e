"""The order of the tasks of each rank in pipeline schedules, from closed rules.

Rank r of p ranks has the stages r, r + p, ... of the model. `schedules` names the sources.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.pipeline.task_simulation import StageTask


class PipelineSize(NamedTuple):
    """Ranks, chunks (stages of a rank), and microbatches."""

    ranks: int
    chunks: int
    microbatches: int


def gpipe_order(size: PipelineSize, rank: int) -> list[StageTask]:
    """Returns all forward passes, then all backward passes."""
    total = size.microbatches * size.chunks
    return [_task(kind, i, rank, size) for kind in "FB" for i in range(total)]


def one_forward_one_backward_order(size: PipelineSize, rank: int) -> list[StageTask]:
    """Returns the order of 1F1B, and of its interleaved form with Megatron-LM's warm-up."""
    total, after = size.microbatches * size.chunks, size.ranks - rank - 1
    first = after if size.chunks == 1 else 2 * after + (size.chunks - 1) * size.ranks
    first = min(first, total)
    found = [_task("F", i, rank, size) for i in range(first)]
    for i in range(total - first):
        found += [_task("F", first + i, rank, size), _task("B", i, rank, size)]
    return found + [_task("B", i, rank, size) for i in range(total - first, total)]


def _task(kind: str, index: int, rank: int, size: PipelineSize) -> StageTask:
    """Returns the task at an index of the interleaved order. A rank works on p microbatches in one
    chunk, then on the same microbatches in the next chunk.
    """
    group, inside = divmod(index, size.ranks * size.chunks)
    chunk, microbatch = divmod(inside, size.ranks)
    if kind == "B":
        chunk = size.chunks - 1 - chunk
    return StageTask(kind, group * size.ranks + microbatch, chunk * size.ranks + rank)


def zero_bubble_order(size: PipelineSize, rank: int) -> list[StageTask]:
    """Returns the order of ZB-H1: 1F1B with weight gradients delayed by `rank` microbatches."""
    warm_up = min(size.ranks - rank - 1, size.microbatches)
    found = [StageTask("F", i, rank) for i in range(warm_up)]
    weights = 0
    for i in range(size.microbatches):
        if warm_up + i < size.microbatches:
            found.append(StageTask("F", warm_up + i, rank))
        found.append(StageTask("I", i, rank))
        if i >= rank:
            found.append(StageTask("W", weights, rank))
            weights += 1
    return found + [StageTask("W", i, rank) for i in range(weights, size.microbatches)]

"""Simulation of a pipeline's tasks with given durations: the begin and the end of each task."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class StageTask(NamedTuple):
    """One task: forward "F", backward "B", input gradient "I", weight gradient "W"."""

    kind: str
    microbatch: int
    stage: int
    """Index of the stage in the model, from 0, counted over all ranks."""

    @property
    def text(self) -> str:
        """The task in torch's notation: stage, kind, microbatch.

        >>> StageTask("F", microbatch=0, stage=1).text
        '1F0'
        """
        return f"{self.stage}{self.kind}{self.microbatch}"


TaskGroup: TypeAlias = tuple[StageTask, ...]
"""Tasks that a rank runs one after another. The rank first waits for the inputs of all tasks, and
sends all results after the last task. Most groups have one task."""


class TaskSpan(NamedTuple):
    """A task with its begin and end."""

    task: StageTask
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class TaskRun:
    """The result of running tasks."""

    spans: tuple[tuple[TaskSpan, ...], ...]
    """The tasks of each rank in their order."""

    @property
    def makespan_s(self) -> float:
        """Seconds from the first task's begin to the last task's end."""
        return max(span.end_s for row in self.spans for span in row) - min(
            span.begin_s for row in self.spans for span in row
        )

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds in which each rank works."""
        return tuple(sum(end - begin for _, begin, end in row) for row in self.spans)

    @property
    def bubble(self) -> float:
        """Fraction of the time in which the ranks wait, on average."""
        return 1 - sum(self.busy_s) / len(self.spans) / self.makespan_s


def run_tasks(
    orders: Sequence[Sequence[TaskGroup]],
    seconds: Callable[[StageTask], float],
    *,
    send_s: float = 0.0,
) -> TaskRun:
    """Simulates each rank's task groups in order. A group waits for the results that it needs.

    `send_s` is the time from the end of a group to the start of its successor on another rank.
    Raises ValueError if groups wait for each other.

    >>> orders = [[(StageTask(kind, 0, stage),) for kind in "FB"] for stage in (0, 1)]
    >>> run = run_tasks(orders, lambda task: 1.0)
    >>> run.makespan_s, run.bubble
    (4.0, 0.5)
    """
    stages = 1 + max(task.stage for order in orders for group in order for task in group)
    ends: dict[StageTask, tuple[float, int]] = {}
    spans: list[list[TaskSpan]] = [[] for _ in orders]
    waiting = [deque(order) for order in orders]
    while any(waiting):
        before = len(ends)
        for rank, groups in enumerate(waiting):
            while groups:
                begin_s = ready_s(groups[0], rank, stages, ends, send_s)
                if begin_s is None:
                    break
                begin_s = max(spans[rank][-1].end_s if spans[rank] else 0.0, begin_s)
                group = groups.popleft()
                for task in group:
                    spans[rank].append(TaskSpan(task, begin_s, begin_s + seconds(task)))
                    begin_s = spans[rank][-1].end_s
                ends.update(dict.fromkeys(group, (begin_s, rank)))
        if len(ends) == before:
            raise ValueError("the tasks of the schedule wait for each other")
    return TaskRun(spans=tuple(map(tuple, spans)))


def ready_s(
    group: TaskGroup,
    rank: int,
    stages: int,
    ends: dict[StageTask, tuple[float, int]],
    send_s: float,
) -> float | None:
    """Returns the time at which a group's inputs are ready; None if a predecessor has not run."""
    found_s = 0.0
    for task in group:
        needed = predecessors(task, stages)
        if not needed or not _are_outside(needed, group):
            continue
        ended = next((ends[each] for each in needed if each in ends), None)
        if ended is None:
            return None
        end_s, source = ended
        found_s = max(found_s, end_s if source == rank else end_s + send_s)
    return found_s


def _are_outside(needed: Sequence[StageTask], group: TaskGroup) -> bool:
    """Returns True if none of the needed tasks belongs to the group."""
    return not any(each in group for each in needed)


def predecessors(task: StageTask, stages: int) -> list[StageTask]:
    """Returns the tasks that can give this task its input. One of them must have run before this
    task. Returns no tasks for the forward task of the first stage.
    """
    kind, microbatch, stage = task
    if kind == "F":
        return [StageTask("F", microbatch, stage - 1)] if stage else []
    if kind == "W":
        return [StageTask("I", microbatch, stage)]
    if stage == stages - 1:
        return [StageTask("F", microbatch, stage)]
    return [StageTask(each, microbatch, stage + 1) for each in ("I", "B")]

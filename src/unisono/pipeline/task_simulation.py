"""Simulation of a pipeline's tasks with given durations: the begin and the end of each task."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
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
    cores: float = inf,
) -> TaskRun:
    """Simulates each rank's task groups in order. A group waits for the results that it needs.

    `seconds` is the time of a task on a core of its own. Ranks that compute at the same time share
    `cores` equally; a rank uses at most one core. `send_s` is the time from the end of a group to
    the start of its successor on another rank. Raises ValueError if groups wait for each other.

    >>> orders = [[(StageTask(kind, 0, stage),) for kind in "FB"] for stage in (0, 1)]
    >>> run = run_tasks(orders, lambda task: 1.0)
    >>> run.makespan_s, run.bubble
    (4.0, 0.5)
    >>> both = [[(StageTask("F", i, 0),)] for i in range(2)]
    >>> run_tasks(both, lambda task: 2.0, cores=1).makespan_s
    4.0
    """
    return _Machine(orders, seconds, send_s, cores).run()


class _Machine:
    """The ranks at one time: their waiting groups, and the tasks that run.

    All tasks that run progress equally fast. So the seconds that a core of its own would have
    worked since the beginning (`_work_s`) tell when each of them ends.
    """

    def __init__(
        self,
        orders: Sequence[Sequence[TaskGroup]],
        seconds: Callable[[StageTask], float],
        send_s: float,
        cores: float,
    ) -> None:
        self._stages = 1 + max(task.stage for order in orders for group in order for task in group)
        self._waiting = [deque(order) for order in orders]
        self._seconds, self._send_s, self._cores = seconds, send_s, cores
        self._spans: list[list[TaskSpan]] = [[] for _ in orders]
        self._arriving: list[tuple[float, int]] = []
        """The time at which the inputs of a rank's next group have arrived, and the rank."""
        self._blocked: set[int] = set()
        """Ranks whose next group needs a task that has not ended."""
        self._needing: dict[StageTask, list[int]] = {}
        """Ranks that needed the result of a task, or of another one in its place."""
        self._running: list[tuple[float, int, int]] = []
        """The work at the end of each task that runs, its rank, and its place in its group."""
        self._begins = [0.0] * len(orders)
        self._ends: dict[StageTask, tuple[float, int]] = {}
        self._now_s = self._work_s = self._lag_s = 0.0

    def run(self) -> TaskRun:
        """Runs all tasks."""
        for rank in range(len(self._waiting)):
            self._await_inputs(rank)
        while self._running or self._arriving:
            end_s = self._time_of(self._running[0][0]) if self._running else inf
            if self._arriving and self._arriving[0][0] <= end_s:
                arrival_s, rank = heappop(self._arriving)
                self._wait_until(arrival_s)
                self._begin(rank, 0)
            else:
                self._finish(end_s)
        if any(self._waiting):
            raise ValueError("the tasks of the schedule wait for each other")
        return TaskRun(spans=tuple(map(tuple, self._spans)))

    def _wait_until(self, arrival_s: float) -> None:
        """Lets the tasks run until the next inputs arrive."""
        rate = self._cores / max(len(self._running), 1)
        if rate >= 1:
            self._work_s = arrival_s - self._lag_s
        else:
            self._work_s += (arrival_s - self._now_s) * rate
            self._lag_s = arrival_s - self._work_s
        self._now_s = arrival_s

    def _time_of(self, work_s: float) -> float:
        """Returns the time at which the ranks that run now have done some work."""
        rate = self._cores / len(self._running)
        if rate >= 1:
            return work_s + self._lag_s  # exact if no core was ever shared
        return self._now_s + (work_s - self._work_s) / rate

    def _begin(self, rank: int, place: int) -> None:
        """Begins a task of a rank's first group."""
        self._begins[rank] = self._now_s
        seconds = self._seconds(self._waiting[rank][0][place])
        heappush(self._running, (self._work_s + seconds, rank, place))

    def _finish(self, end_s: float) -> None:
        """Ends the task that ends first, and begins the next task of its group."""
        work_s = self._running[0][0]
        self._now_s, self._work_s, self._lag_s = end_s, work_s, end_s - work_s
        _, rank, place = heappop(self._running)
        group = self._waiting[rank][0]
        self._spans[rank].append(TaskSpan(group[place], self._begins[rank], end_s))
        if place + 1 < len(group):
            self._begin(rank, place + 1)
            return
        self._waiting[rank].popleft()
        self._ends.update(dict.fromkeys(group, (end_s, rank)))
        self._await_inputs(rank)
        for task in group:
            for other in self._needing.pop(task, ()):
                if other in self._blocked:
                    self._blocked.remove(other)
                    self._await_inputs(other)

    def _await_inputs(self, rank: int) -> None:
        """Notes when the inputs of a rank's next group arrive, or which task they need first."""
        if not self._waiting[rank]:
            return
        group, found_s = self._waiting[rank][0], self._now_s
        for task in group:
            needed = predecessors(task, self._stages)
            if not needed or any(each in group for each in needed):
                continue
            ended = next((self._ends[each] for each in needed if each in self._ends), None)
            if ended is None:
                self._blocked.add(rank)
                for each in needed:
                    self._needing.setdefault(each, []).append(rank)
                return
            end_s, source = ended
            found_s = max(found_s, end_s if source == rank else end_s + self._send_s)
        heappush(self._arriving, (found_s, rank))


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

"""The time of pipeline tasks whose ranks share the cores of a machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from unisono.planner.pipeline.task_run import StageTask, TaskGroup, ready_s


def shared_makespan_s(
    orders: Sequence[Sequence[TaskGroup]],
    seconds: Callable[[StageTask], float],
    *,
    cores: float,
    send_s: float = 0.0,
) -> float:
    """Returns the seconds from the first task's begin to the last task's end.

    Tasks run as in `run_tasks`, but ranks that compute at the same time share `cores` equally;
    a rank uses at most one core. `seconds` is the time of a task on a core of its own. Raises
    `ValueError` if tasks wait for each other.

    >>> orders = [[(StageTask("F", i, 0),)] for i in range(3)]
    >>> shared_makespan_s(orders, lambda task: 2.0, cores=1)
    6.0
    """
    return _Machine(orders, seconds, cores, send_s).run()


class _Machine:
    """The state of the ranks at one time: their waiting groups, and the work left of each group."""

    def __init__(
        self,
        orders: Sequence[Sequence[TaskGroup]],
        seconds: Callable[[StageTask], float],
        cores: float,
        send_s: float,
    ) -> None:
        self._stages = 1 + max(task.stage for order in orders for group in order for task in group)
        self._waiting = [deque(order) for order in orders]
        self._seconds, self._cores, self._send_s = seconds, cores, send_s
        self._left_s: dict[int, float] = {}
        self._ends: dict[StageTask, tuple[float, int]] = {}
        self._now_s = 0.0

    def run(self) -> float:
        """Returns the time at which the last task ends."""
        while any(self._waiting):
            next_s = self._begin_ready()
            if not self._left_s and next_s is None:
                raise ValueError("the tasks of the schedule wait for each other")
            self._advance(next_s)
        return self._now_s

    def _begin_ready(self) -> float | None:
        """Begins the groups whose inputs have arrived; returns when the next inputs arrive."""
        next_s: float | None = None
        for rank, groups in enumerate(self._waiting):
            if not groups or rank in self._left_s:
                continue
            found_s = ready_s(groups[0], rank, self._stages, self._ends, self._send_s)
            if found_s is not None and found_s <= self._now_s:
                self._left_s[rank] = sum(map(self._seconds, groups[0]))
            elif found_s is not None:
                next_s = found_s if next_s is None else min(next_s, found_s)
        return next_s

    def _advance(self, next_s: float | None) -> None:
        """Computes until a group ends or inputs arrive."""
        if not self._left_s:
            assert next_s is not None  # otherwise `run` has raised an error
            self._now_s = next_s
            return
        rate = min(1.0, self._cores / len(self._left_s))
        shortest_s = min(self._left_s.values())
        step_s = shortest_s / rate
        arrives = next_s is not None and next_s - self._now_s < step_s
        if arrives:
            assert next_s is not None
            step_s, shortest_s = next_s - self._now_s, (next_s - self._now_s) * rate
            self._now_s = next_s
        else:
            self._now_s += step_s
        for rank in list(self._left_s):
            self._left_s[rank] -= shortest_s
            if not arrives and self._left_s[rank] <= 1e-12:
                del self._left_s[rank]
                group = self._waiting[rank].popleft()
                self._ends.update(dict.fromkeys(group, (self._now_s, rank)))

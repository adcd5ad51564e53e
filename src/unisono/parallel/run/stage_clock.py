"""The times at which the stages of a rank compute."""

from __future__ import annotations

import time

from unisono.planner import StageTask, TaskSpan


class StageClock:
    """Recorder of the times of a step's forward and backward passes."""

    def __init__(self) -> None:
        self.spans: list[TaskSpan] = []
        """The passes of the step, by the host's monotonic clock."""
        self.result_bytes: dict[int, tuple[int, int]] = {}
        """For each stage, the bytes of its results for a microbatch, and the bytes of the results
        that need a gradient."""

    @property
    def busy_s(self) -> float:
        """Seconds in forward and backward passes."""
        return sum(end_s - begin_s for _, begin_s, end_s in self.spans)

    @property
    def span(self) -> tuple[float, float]:
        """Beginning of the first pass and end of the last pass; (0, 0) without passes."""
        if not self.spans:
            return 0.0, 0.0
        return self.spans[0].begin_s, self.spans[-1].end_s

    def restart(self) -> None:
        """Discards the recorded passes, before the next step."""
        self.spans = []

    def working(self, task: StageTask) -> _Work:
        """Records the time of the `with` block as the time of a task."""
        return _Work(task, self.spans)


class _Work:
    """A `with` block whose time is recorded; faster than a generator, for many short passes."""

    __slots__ = ("_begin_s", "_spans", "_task")

    def __init__(self, task: StageTask, spans: list[TaskSpan]) -> None:
        self._task, self._spans = task, spans

    def __enter__(self) -> None:
        self._begin_s = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._spans.append(TaskSpan(self._task, self._begin_s, time.monotonic()))

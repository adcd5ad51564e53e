"""The times in which the stages of a rank compute."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from unisono.planner import StageTask, TaskSpan


class StageClock:
    """The passes of a step and their times."""

    def __init__(self) -> None:
        self.spans: list[TaskSpan] = []
        """The passes of the step, by the host's monotonic clock."""

    @property
    def busy_s(self) -> float:
        """Seconds in forward and backward passes."""
        return sum(end_s - begin_s for _, begin_s, end_s in self.spans)

    @property
    def span(self) -> tuple[float, float]:
        """The first begin and the last end; equal without work."""
        if not self.spans:
            return 0.0, 0.0
        return self.spans[0].begin_s, self.spans[-1].end_s

    def restart(self) -> None:
        """Forgets the last step."""
        self.spans = []

    @contextmanager
    def working(self, task: StageTask) -> Iterator[None]:
        """Counts the block as the computation of a task."""
        begin_s = time.monotonic()
        try:
            yield
        finally:
            self.spans.append(TaskSpan(task, begin_s, time.monotonic()))

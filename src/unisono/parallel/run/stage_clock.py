"""The times at which the stages of a rank compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unisono.pipeline import StageTask, TaskSpan


class StageClock:
    """Recorder of the times of a step's forward and backward passes."""

    def __init__(self) -> None:
        self._passes: list[tuple[str, int, int, float, float]] = []
        self.tell: Callable[[str, float], None] | None = None
        """Function that gets the kind and the beginning of each pass at the end of the pass."""

    @property
    def spans(self) -> list[TaskSpan]:
        """The passes of the step, by the host's monotonic clock."""
        return [
            TaskSpan(StageTask(kind, microbatch, stage), begin_s, end_s)
            for kind, microbatch, stage, begin_s, end_s in self._passes
        ]

    @property
    def busy_s(self) -> float:
        """Seconds in forward and backward passes."""
        return sum(end_s - begin_s for *_, begin_s, end_s in self._passes)

    @property
    def span(self) -> tuple[float, float]:
        """Beginning of the first pass and end of the last pass; (0, 0) without passes."""
        if not self._passes:
            return 0.0, 0.0
        return self._passes[0][-2], self._passes[-1][-1]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keeps the passes of the last step, and tells nobody of those inside."""
        passes, tell = self._passes, self.tell
        self.tell = None
        try:
            yield
        finally:
            self._passes, self.tell = passes, tell

    def restart(self) -> None:
        """Discards the recorded passes, before the next step."""
        self._passes = []

    def record(self, kind: str, microbatch: int, stage: int, begin_s: float) -> None:
        """Records a pass that began at `begin_s` by `time.monotonic` and ends now.

        `kind`: that of the pass's `StageTask`. This method makes no objects, since a step has many
        short passes.
        """
        self._passes.append((kind, microbatch, stage, begin_s, time.monotonic()))
        if self.tell is not None:
            self.tell(kind, begin_s)

"""The time that the stages of a rank compute, and the span in which they do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StageClock:
    """Seconds of computation in a step, and the first and last moment of it."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        """Seconds in forward and backward passes."""
        self._first_s: float | None = None
        self._last_s = 0.0

    @property
    def span(self) -> tuple[float, float]:
        """The first begin and the last end, by the host's monotonic clock; equal without work."""
        return (self._last_s if self._first_s is None else self._first_s), self._last_s

    def restart(self) -> None:
        """Forgets the last step."""
        self.busy_s, self._first_s, self._last_s = 0.0, None, 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts the block as computation."""
        start_s = time.monotonic()
        if self._first_s is None:
            self._first_s = start_s
        try:
            yield
        finally:
            self._last_s = time.monotonic()
            self.busy_s += self._last_s - start_s

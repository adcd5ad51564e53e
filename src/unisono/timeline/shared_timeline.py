"""The timeline of a rank, which all communicators of the rank share."""

from __future__ import annotations

import threading

from unisono.timeline.timeline_writer import TimelineWriter


class SharedTimeline:
    """Makes a rank's timeline when it is first used. The timeline's file is removed with this
    object.

    >>> shared = SharedTimeline(rank=0, size=1, job="example")
    >>> timeline = shared.open()
    >>> shared.open() is timeline
    True
    """

    def __init__(self, *, rank: int, size: int, job: str) -> None:
        self._rank = rank
        self._size = size
        self._job = job
        self._lock = threading.Lock()
        self._found: TimelineWriter | None = None

    def open(self) -> TimelineWriter:
        """Returns the rank's timeline, and makes it on the first call."""
        with self._lock:
            if self._found is None:
                self._found = TimelineWriter(rank=self._rank, size=self._size, job=self._job)
            return self._found

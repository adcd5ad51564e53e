"""Records the last events of one rank in a fixed amount of memory."""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from unisono import config, native
from unisono.timeline.clock_offset import ClockReading, clock_identity
from unisono.timeline.event_kinds import EventKind
from unisono.timeline.rank_dump import RankDump
from unisono.timeline.timeline_file import ENTRIES_AT, FactsWriter, NameTable, file_bytes
from unisono.timeline.timeline_folder import make_file

_log = logging.getLogger("unisono.timeline")

_LONGEST_FAILURE: Final = 300


class Record(Protocol):
    """Type of the function that records an event at the current time."""

    def __call__(
        self,
        kind: int,
        name: str,
        number: int = 0,
        value: int = 0,
        begun_ns: int = 0,
        ended_ns: int = 0,
    ) -> None:
        """Records an event. May be called from any thread. Does not block or raise."""


class TimelineWriter:
    """A rank's timeline: a ring buffer of the rank's last events, in a file that other processes
    can read.

    The file is removed with this object, or when the process ends normally. The file remains if the
    process is killed, or after `keep`. If there is no space for the file, nothing is recorded and
    `path` is None.

    >>> timeline = TimelineWriter(rank=0, size=1, events=64)
    >>> timeline.record(EventKind.SUBMITTED, "layer1.weight", value=4096)
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        job: str = "",
        events: int | None = None,
        folder: Path | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        clock: str | None = None,
    ) -> None:
        """Makes the file. `job` is a text that is equal on all ranks of a job. `events` is the
        number of events in the ring buffer. With 0 events, nothing is recorded; the default is
        `UNISONO_TIMELINE_EVENTS`. `now_ns` and `clock` are a clock and its name, by default the
        kernel's monotonic clock.
        """
        self.rank = rank
        self.size = size
        self.path: Path | None = None
        self.now_ns = now_ns
        self.record: Record = _ignore
        self.ring: native.TimelineRing | None = None
        """The ring buffer to which `record` writes; None if nothing is recorded."""
        self.next_number = itertools.count(1).__next__
        """Returns the next number of a collective or bucket of this rank; numbers are unique."""
        self._facts: dict[str, Any] = {}
        self._writer: FactsWriter | None = None
        events = config.timeline_settings().events if events is None else events
        if events == 0:
            return
        try:
            self.path, descriptor = make_file(
                file_bytes(events), None if folder is None else (folder,)
            )
        except OSError as error:
            _log.warning("no timeline is recorded: %s", error)
            return
        try:
            memory = mmap.mmap(descriptor, file_bytes(events))
        finally:
            os.close(descriptor)  # the memory map's copy of the descriptor keeps the file locked
        self._facts = _facts(rank, size, job, now_ns, clock)
        self._writer = FactsWriter(memory, events)
        self._writer.write(self._facts)
        self.ring = _ring(memory, events, None if now_ns is time.monotonic_ns else now_ns)
        _disown_in_children(self.ring)
        self.record = self.ring.record
        self._finalizer = weakref.finalize(self, _remove, self.path, os.getpid())

    def note_clock(self, reading: ClockReading) -> None:
        """Stores a comparison of this rank's clock with another clock. Only the first and the last
        comparison are kept."""
        readings = [*self._facts.get("readings", ())[:1], reading.to_json()]
        self._update(readings=readings)

    def dump(self) -> RankDump:
        """Returns a dump of the current events. Raises `ValueError` if nothing is recorded."""
        if self.path is None:
            raise ValueError("expected a timeline that records events; this one records none")
        return RankDump.parse(self.path.read_bytes())

    def keep(self, error: BaseException) -> None:
        """Keeps the file after the end of this process, for use when an error ends the process.
        Logs the file's path."""
        if self._writer is None or not self._finalizer.alive:
            return
        text = f"{type(error).__name__}: {error}"[:_LONGEST_FAILURE]
        self.record(EventKind.FAILED, type(error).__name__)
        self._update(failure=text)
        self._finalizer.detach()
        _log.warning("rank %d keeps its timeline: unisono trace %s", self.rank, self.path)

    def _update(self, **facts: Any) -> None:
        if self._writer is not None:
            self._facts.update(facts)
            self._writer.write(self._facts)


def _ignore(
    kind: int, name: str, number: int = 0, value: int = 0, begun_ns: int = 0, ended_ns: int = 0
) -> None:
    """Records nothing. Used as `record` by a writer that has no ring buffer."""


def _ring(memory: mmap.mmap, events: int, clock: Callable[[], int] | None) -> native.TimelineRing:
    """Returns a ring buffer of events in the file's memory."""
    table = NameTable(memory)
    content = np.frombuffer(memory, np.uint8)

    def name_thread() -> int:
        return table.add(threading.current_thread().name)

    return native.TimelineRing(
        content.ctypes.data + ENTRIES_AT, events, content, table.ids, table.add, name_thread, clock
    )


def _facts(
    rank: int, size: int, job: str, now_ns: Callable[[], int], clock: str | None
) -> dict[str, Any]:
    # Read the calendar clock between two readings of the rank's clock. Of 5 attempts, use the one
    # that took the least time.
    readings = [(now_ns(), time.time_ns(), now_ns()) for _ in range(5)]
    before_ns, wall_ns, after_ns = min(readings, key=lambda each: each[2] - each[0])
    return {
        "rank": rank,
        "size": size,
        "job": job[:64],
        "pid": os.getpid(),
        "host": socket.gethostname()[:64],
        "clock": clock_identity() if clock is None else clock,
        "wall_ns": wall_ns,
        "now_ns": (before_ns + after_ns) // 2,
    }


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not remove its parent's file
        path.unlink(missing_ok=True)


def _disown_in_children(ring: native.TimelineRing) -> None:
    """Stops recording in forked children, which share the parent's memory but must not write to its
    ring buffer."""
    reference = weakref.ref(ring)

    def disown() -> None:
        if (found := reference()) is not None:
            found.disown()

    os.register_at_fork(after_in_child=disown)

"""Timelines with events at given times."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unisono.timeline import EventKind, RankDump, TimelineWriter

MS = 1_000_000
"""Nanoseconds of a millisecond."""

Event = tuple[Any, ...]
"""Time in ms, kind, name, number, value, begin in ms, end in ms; the last four may be missing."""


class ScriptedClock:
    """A clock that shows the time to which it was set."""

    def __init__(self, now_ns: int = 0) -> None:
        self.value_ns = now_ns

    def __call__(self) -> int:
        return self.value_ns


def scripted_writer(folder: Path, script: Iterable[Event], **arguments: Any) -> TimelineWriter:
    """Returns a timeline that has recorded the events."""
    clock = ScriptedClock()
    given = {"rank": 0, "size": 1, "events": 4096, "clock": "test", **arguments}
    timeline = TimelineWriter(folder=folder, now_ns=clock, **given)
    for event in script:
        time_ms, kind, name, number, value, begun_ms, ended_ms = (*event, 0, 0, 0, 0)[:7]
        clock.value_ns = round(time_ms * MS)
        timeline.record(kind, name, number, value, round(begun_ms * MS), round(ended_ms * MS))
    return timeline


def scripted_dump(folder: Path, script: Iterable[Event], **arguments: Any) -> RankDump:
    """Returns the dump of a timeline that has recorded the events."""
    return scripted_writer(folder, script, **arguments).dump()


def phase(name: str, step: int, begun_ms: float, ended_ms: float) -> list[Event]:
    """Returns the begin and end events of a phase."""
    return [
        (begun_ms, EventKind.BEGUN, name, step),
        (ended_ms, EventKind.ENDED, name, step),
    ]


def collective(
    number: int, name: str, launched_ms: float, moved: tuple[float, float]
) -> list[Event]:
    """Returns the events of a collective of one tensor, which is submitted and launched at the same
    time.
    """
    return [
        (launched_ms, EventKind.SUBMITTED, name, 0, 4000),
        (launched_ms, EventKind.LAUNCHED, name, number),
        (launched_ms, EventKind.FUSED, name, number, 4000),
        (moved[1], EventKind.TRANSFERRED, name, number, 1, *moved),
    ]


def wait(name: str, begun_ms: float, ended_ms: float) -> Event:
    """Returns the event of one wait."""
    return (ended_ms, EventKind.WAITED, name, 0, 0, begun_ms, ended_ms)


def in_order(*parts: Iterable[Event]) -> list[Event]:
    """Returns the events of all arguments in order of time."""
    return sorted((event for part in parts for event in part), key=lambda event: event[0])

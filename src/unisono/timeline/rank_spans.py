"""Finds intervals in the events of one rank: phases, tensors, collectives and waits.

The event at the begin of an interval may be overwritten, and the interval may not have ended yet.
In these cases the interval begins with the first event or ends with the last event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from unisono.timeline.event_kinds import EventKind
from unisono.timeline.rank_dump import RankDump


class Interval(NamedTuple):
    """An interval from `begun_ns` to `ended_ns` of the rank's clock."""

    begun_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """A phase of a step. `whole` is true if the begin and the end of the phase are known."""

    name: str
    step: int
    when: Interval
    whole: bool = True


@dataclass(slots=True, kw_only=True)
class CollectiveSpan:
    """A collective of one or more tensors. Times are in ns of the rank's clock; None means that the
    time is not reached yet."""

    number: int
    launched_ns: int
    tensors: list[str] = field(default_factory=list)
    moved: Interval | None = None
    """Interval in which the collective ran; None if it has not ended."""
    done_ns: int | None = None
    """Time at which the program was notified of the end of the collective."""
    ran: bool = True
    """False if a rank was not ready, so that no data were transferred."""
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpan:
    """A submitted tensor. `collective` is the collective that carried the tensor, or None while the
    tensor waits."""

    name: str
    nbytes: int
    submitted_ns: int
    collective: CollectiveSpan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSpan:
    """An interval in which a thread waited for a tensor."""

    name: str
    when: Interval
    thread: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureMark:
    """An error and its time."""

    name: str
    at_ns: int


@dataclass(slots=True, kw_only=True)
class RankSpans:
    """All intervals of one rank, and the times of its first and last event (`extent`)."""

    extent: Interval
    phases: list[PhaseSpan] = field(default_factory=list)
    collectives: list[CollectiveSpan] = field(default_factory=list)
    tensors: list[TensorSpan] = field(default_factory=list)
    waits: list[WaitSpan] = field(default_factory=list)
    failures: list[FailureMark] = field(default_factory=list)


def spans_of(dump: RankDump) -> RankSpans:
    """Returns the intervals that are found in a rank's events.

    >>> from unisono.timeline import TimelineWriter
    >>> timeline = TimelineWriter(rank=0, size=1, events=64, now_ns=iter(range(99)).__next__)
    >>> timeline.record(EventKind.BEGUN, "forward")
    >>> timeline.record(EventKind.ENDED, "forward")
    >>> [found] = spans_of(timeline.dump()).phases
    >>> found.name, found.when.ended_ns - found.when.begun_ns
    ('forward', 1)
    """
    return _SpanFinder(dump).found


class _SpanFinder:
    """Finds intervals in one pass over the events."""

    def __init__(self, dump: RankDump) -> None:
        events = dump.events
        first = int(events["time_ns"].min()) if len(events) else dump.now_ns
        last = int(events["time_ns"].max()) if len(events) else dump.now_ns
        self.found = RankSpans(extent=Interval(first, last))
        self._names = dump.names
        self._by_number: dict[int, CollectiveSpan] = {}
        # For each tensor that waits: its time of submission, and its size in bytes.
        self._waiting: dict[str, tuple[int, int]] = {}
        # For the number of each collective: the tensors that it carries.
        self._carried: dict[int, list[TensorSpan]] = {}
        self._open_phases: dict[tuple[str, int], int] = {}
        self._buckets = _buckets(dump)
        act = {
            EventKind.SUBMITTED: self._submit,
            EventKind.LAUNCHED: self._launch,
            EventKind.FUSED: self._fuse,
            EventKind.TRANSFERRED: self._end_transfer,
            EventKind.WAITED: self._wait,
            EventKind.BEGUN: self._begin,
            EventKind.ENDED: self._end,
            EventKind.FAILED: self._fail,
        }
        for event in events:
            if (action := act.get(event["kind"])) is not None:
                action(event, dump.name_of(event))
        self._end_open(last)

    def _submit(self, event: Any, name: str) -> None:
        self._waiting[name] = int(event["time_ns"]), int(event["value"])

    def _launch(self, event: Any, name: str) -> None:
        number = int(event["number"])
        span = CollectiveSpan(number=number, launched_ns=int(event["time_ns"]))
        self._by_number[number] = span
        self.found.collectives.append(span)
        if bucket := int(event["value"]):
            for tensor, nbytes in self._buckets.get(bucket, {name: 0}).items():
                self._carry(span, tensor, nbytes)

    def _fuse(self, event: Any, name: str) -> None:
        span = self._by_number.get(int(event["number"]))
        if span is not None:  # None if the LAUNCHED event is overwritten
            self._carry(span, name, int(event["value"]))

    def _carry(self, span: CollectiveSpan, name: str, nbytes: int) -> None:
        span.tensors.append(name)
        span.nbytes += nbytes
        submitted_ns, _ = self._waiting.pop(name, (span.launched_ns, 0))
        self._carried.setdefault(span.number, []).append(
            TensorSpan(name=name, nbytes=nbytes, submitted_ns=submitted_ns, collective=span)
        )

    def _end_transfer(self, event: Any, name: str) -> None:
        span = self._by_number.get(int(event["number"]))
        moved = Interval(int(event["begun_ns"]), int(event["ended_ns"]))
        if span is None:
            span = CollectiveSpan(
                number=int(event["number"]), launched_ns=moved.begun_ns, tensors=[name]
            )
            self.found.collectives.append(span)
        span.moved, span.done_ns = moved, int(event["time_ns"])
        span.launched_ns = min(span.launched_ns, moved.begun_ns)
        span.ran = bool(event["value"])
        carried = self._carried.pop(span.number, [])
        if span.ran:
            self.found.tensors += carried
        else:
            self._waiting.update({each.name: (each.submitted_ns, each.nbytes) for each in carried})

    def _wait(self, event: Any, name: str) -> None:
        when = Interval(int(event["begun_ns"]), int(event["ended_ns"]))
        thread = self._names[event["thread"]]
        self.found.waits.append(WaitSpan(name=name, when=when, thread=thread))

    def _begin(self, event: Any, name: str) -> None:
        self._open_phases[name, int(event["number"])] = int(event["time_ns"])

    def _end(self, event: Any, name: str) -> None:
        step = int(event["number"])
        begun_ns: int | None = int(event["begun_ns"])
        if not begun_ns:
            begun_ns = self._open_phases.pop((name, step), None)
        start_ns = self.found.extent.begun_ns if begun_ns is None else begun_ns
        self._add_phase(name, step, start_ns, int(event["time_ns"]), whole=begun_ns is not None)

    def _add_phase(self, name: str, step: int, begun: int, ended: int, *, whole: bool) -> None:
        when = Interval(begun, ended)
        self.found.phases.append(PhaseSpan(name=name, step=step, when=when, whole=whole))

    def _fail(self, event: Any, name: str) -> None:
        self.found.failures.append(FailureMark(name=name, at_ns=int(event["time_ns"])))

    def _end_open(self, last_ns: int) -> None:
        for (name, step), begun_ns in self._open_phases.items():
            self._add_phase(name, step, begun_ns, last_ns, whole=False)
        for carried in self._carried.values():
            self.found.tensors += carried
        for name, (submitted_ns, nbytes) in self._waiting.items():
            self.found.tensors.append(
                TensorSpan(name=name, nbytes=nbytes, submitted_ns=submitted_ns, collective=None)
            )
        self.found.phases.sort(key=lambda phase: phase.when)


def _buckets(dump: RankDump) -> dict[int, dict[str, int]]:
    """Returns the tensors of each bucket, with their sizes in bytes."""
    found: dict[int, dict[str, int]] = {}
    for event in dump.events[dump.events["kind"] == EventKind.PLANNED]:
        bucket = found.setdefault(int(event["number"]), {})
        bucket[dump.name_of(event)] = int(event["value"])
    return found

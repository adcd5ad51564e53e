"""Writes the timelines of all ranks as one trace for ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from unisono.chrome_trace import (
    TraceEvent,
    async_events,
    instant_event,
    lanes,
    process_name,
    slice_event,
    thread_name,
    trace_text,
)
from unisono.timeline.aligned_ranks import AlignedRank, align_ranks, missing_ranks
from unisono.timeline.rank_dump import RankDump
from unisono.timeline.rank_spans import CollectiveSpan, Interval, TensorSpan
from unisono.timeline.torch_ranges import TorchTrace, torch_events

_NS_PER_S: Final = 1_000_000_000
_NAMES_IN_ARGS: Final = 32
_ROWS: Final = {"training": 1, "waits": 100, "collectives": 200}
"""Thread number of each row of a rank's process. If slices of a row overlap, it gets more lanes
with the next thread numbers."""


def merge_dumps(dumps: Sequence[RankDump], torch_traces: Sequence[TorchTrace] = ()) -> str:
    """Returns the trace of all ranks, as JSON in the Trace Event Format. A pure function.

    Each rank is a process. The process has rows for phases, waits and collectives, and an interval
    for each tensor from its submission to the end of its collective. `otherData` has the clock
    error of each rank, the ranks without a dump, and the number of events that were overwritten.

    Raises `ValueError` if there are no dumps, or if the process of a trace of torch has no dump.

    >>> from unisono.timeline import EventKind, TimelineWriter
    >>> timeline = TimelineWriter(rank=0, size=2, events=64)
    >>> timeline.record(EventKind.SUBMITTED, "layer1.weight", value=4)
    >>> '"missing_ranks": [1]' in merge_dumps([timeline.dump()])
    True
    """
    if not dumps:
        raise ValueError("expected the dump of at least one rank, got none")
    ranks = align_ranks(dumps)
    base_ns = min(rank.unix_ns(rank.spans.extent.begun_ns) for rank in ranks)
    base_ns -= base_ns % _NS_PER_S
    pids = _pids(ranks)
    events: list[TraceEvent] = []
    for pid, rank in zip(pids, ranks, strict=True):
        events += _RankEvents(rank, pid, base_ns).all()
    events += torch_events(torch_traces, list(zip(pids, ranks, strict=True)), base_ns)
    return trace_text(events, base_ns=base_ns, otherData=_facts(ranks))


def _pids(ranks: Sequence[AlignedRank]) -> list[int]:
    """Returns a process number for each dump: its rank. If two dumps have the same rank, all dumps
    get the numbers 0, 1, 2, ... instead."""
    plain = [rank.dump.rank for rank in ranks]
    return plain if len(set(plain)) == len(plain) else list(range(len(plain)))


def _facts(ranks: Sequence[AlignedRank]) -> dict[str, Any]:
    missing = missing_ranks([rank.dump for rank in ranks])
    return {
        "missing_ranks": sorted({each for found in missing.values() for each in found}),
        "ranks": [
            {
                "job": rank.dump.job,
                "rank": rank.dump.rank,
                "host": rank.dump.host,
                "process": rank.dump.pid,
                "clock_error_us": None if rank.error_ns is None else rank.error_ns / 1e3,
                "lost_events": rank.dump.lost,
                "failure": rank.dump.failure,
            }
            for rank in ranks
        ],
    }


class _RankEvents:
    """The trace events of one rank."""

    def __init__(self, rank: AlignedRank, pid: int, base_ns: int) -> None:
        self._rank = rank
        self._pid = pid
        self._base_ns = base_ns

    def all(self) -> Iterator[TraceEvent]:
        """Yields all trace events of the rank."""
        spans, pid = self._rank.spans, self._pid
        yield from process_name(pid, _title(self._rank))
        phases = [
            (each.name, each.when, {"step": each.step, "whole": each.whole})
            for each in spans.phases
        ]
        waits: list[tuple[str, Interval, Mapping[str, Any]]] = [
            (f"waits for {each.name}", each.when, {}) for each in spans.waits
        ]
        last_ns = spans.extent.ended_ns
        moved = [
            (_collective_name(each), _moved(each, last_ns), _collective_args(each))
            for each in spans.collectives
        ]
        yield from self._row("training", phases)
        yield from self._row("waits", waits)
        yield from self._row("collectives", moved)
        for mark in spans.failures:
            yield instant_event(mark.name, self._s(mark.at_ns), pid=pid, tid=_ROWS["training"])
        for index, tensor in enumerate(spans.tensors):
            yield from self._tensor(tensor, f"{pid}.{index}")

    def _row(
        self, row: str, found: Sequence[tuple[str, Interval, Mapping[str, Any]]]
    ) -> Iterator[TraceEvent]:
        first = _ROWS[row]
        used = lanes([when for _, when, _ in found])
        for lane in sorted(set(used)):
            yield from thread_name(self._pid, first + lane, row)
        for (name, when, args), lane in zip(found, used, strict=True):
            begun_s, ended_s = self._s(when.begun_ns), self._s(when.ended_ns)
            where = {"pid": self._pid, "tid": first + lane}
            yield slice_event(name, begun_s, ended_s, **where, cat=row, args=dict(args))

    def _tensor(self, tensor: TensorSpan, key: str) -> Iterator[TraceEvent]:
        last_ns, collective = self._rank.spans.extent.ended_ns, tensor.collective
        parts: list[tuple[str, int, int]] = []
        if collective is None:
            ended_ns = last_ns
            parts.append(("waits for other ranks", tensor.submitted_ns, last_ns))
        else:
            moved = _moved(collective, last_ns)
            ended_ns = max(moved.ended_ns, collective.done_ns or last_ns)
            parts.append(("is agreed on", tensor.submitted_ns, collective.launched_ns))
            parts.append(("is moved", moved.begun_ns, moved.ended_ns))
        shared: dict[str, Any] = {"pid": self._pid, "key": key, "cat": "tensor"}
        args = {"bytes": tensor.nbytes, "collective": collective and collective.number}
        begun_ns = min(tensor.submitted_ns, *(begun for _, begun, _ in parts))
        whole = async_events(tensor.name, self._s(begun_ns), self._s(ended_ns), **shared, args=args)
        yield whole[0]
        for name, part_begun_ns, part_ended_ns in parts:
            if part_begun_ns < part_ended_ns:
                yield from async_events(
                    name, self._s(part_begun_ns), self._s(part_ended_ns), **shared
                )
        yield whole[1]

    def _s(self, time_ns: int) -> float:
        return (self._rank.unix_ns(time_ns) - self._base_ns) / _NS_PER_S


def _title(rank: AlignedRank) -> str:
    dump, error_ns = rank.dump, rank.error_ns
    error = "not compared" if error_ns is None else f"within {error_ns / 1e3:.3g} us"
    return f"rank {dump.rank} ({dump.host}, process {dump.pid}; clock {error})"


def _collective_name(span: CollectiveSpan) -> str:
    return span.tensors[0] if len(span.tensors) == 1 else f"{len(span.tensors)} tensors"


def _collective_args(span: CollectiveSpan) -> dict[str, Any]:
    return {
        "number": span.number,
        "bytes": span.nbytes,
        "tensors": span.tensors[:_NAMES_IN_ARGS],
        "ran": span.ran,
        "ended": span.moved is not None,
    }


def _moved(span: CollectiveSpan, last_ns: int) -> Interval:
    return span.moved or Interval(span.launched_ns, max(span.launched_ns, last_ns))

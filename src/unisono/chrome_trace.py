"""Writes and checks traces in the Trace Event Format (Google, 2016), which ui.perfetto.dev opens.

Times are microseconds from `baseTimeNanoseconds`, as in torch's traces. Slices (`X`) of one thread
must nest: Perfetto drops a slice that begins inside another and ends after it. `lanes` finds a
thread for each slice so that all nest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

TraceEvent = dict[str, Any]

_NS_PER_S = 1_000_000_000


def slice_event(
    name: str, begun_s: float, ended_s: float, *, pid: int, tid: int, **others: Any
) -> TraceEvent:
    """Returns the event of a slice: a named interval on a thread.

    `others` are further fields of the event, such as `cat` and `args`.

    >>> slice_event("forward", 0.5, 0.75, pid=0, tid=1)["dur"]
    250000.0
    """
    begun_us, ended_us = _us(begun_s), _us(ended_s)
    times = {"ts": begun_us, "dur": round(ended_us - begun_us, 3)}
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, **times, **others}


def async_events(
    name: str, begun_s: float, ended_s: float, *, pid: int, key: str, **others: Any
) -> list[TraceEvent]:
    """Returns the begin and end events of an interval that belongs to no thread.

    Intervals with the same `cat` and `key` must nest.

    >>> [event["ph"] for event in async_events("w", 0.0, 1.0, pid=0, key="1", cat="tensor")]
    ['b', 'e']
    """
    shared = {"name": name, "pid": pid, "id": key, "cat": others.pop("cat", "async")}
    begin = {"ph": "b", **shared, "ts": _us(begun_s), **others}
    return [begin, {"ph": "e", **shared, "ts": _us(ended_s)}]


def instant_event(name: str, at_s: float, *, pid: int, tid: int, **others: Any) -> TraceEvent:
    """Returns the event of a point in time on a thread: a mark without a duration.

    >>> instant_event("failed", 1.0, pid=0, tid=0)["ph"]
    'i'
    """
    return {"ph": "i", "s": "t", "name": name, "pid": pid, "tid": tid, "ts": _us(at_s), **others}


def process_name(pid: int, name: str) -> list[TraceEvent]:
    """Returns the events that set a process's name and its position in the list of processes.

    >>> [event["name"] for event in process_name(3, "rank 3")]
    ['process_name', 'process_sort_index']
    """
    return [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}},
    ]


def thread_name(pid: int, tid: int, name: str) -> list[TraceEvent]:
    """Returns the events that set a thread's name and its position in the list of threads.

    >>> thread_name(0, 2, "waits")[0]["args"]
    {'name': 'waits'}
    """
    where = {"ph": "M", "pid": pid, "tid": tid}
    return [
        {**where, "name": "thread_name", "args": {"name": name}},
        {**where, "name": "thread_sort_index", "args": {"sort_index": tid}},
    ]


def trace_text(events: Iterable[TraceEvent], *, base_ns: int = 0, **others: Any) -> str:
    """Returns the trace as JSON. `base_ns` is the Unix time in ns of the trace's time 0.

    Raises `ValueError` unless `base_ns` is a number of whole seconds. Programs that read traces
    store numbers as doubles, which are exact for whole seconds but not for every time in ns
    (pytorch/kineto#919).

    >>> trace_text([], base_ns=1_700_000_000_000_000_000)[:40]
    '{"traceEvents": [], "displayTimeUnit": "'
    """
    if base_ns % _NS_PER_S:
        raise ValueError(f"base_ns: expected a number of whole seconds, got {base_ns}")
    base = {"baseTimeNanoseconds": base_ns} if base_ns else {}
    return json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms", **base, **others})


def lanes(spans: Sequence[tuple[float, float]], *, nest: bool = False) -> list[int]:
    """Returns the index of a lane (a row of the drawn trace) for each span (begin, end). Without
    `nest`, the spans of a lane do not overlap.

    With `nest`, a span may also lie inside another span of its lane. Uses the fewest lanes without
    `nest` (greedy interval partitioning; Kleinberg and Tardos, Algorithm Design, section 4.1).

    >>> lanes([(0, 2), (1, 3), (2, 4)])
    [0, 1, 0]
    >>> lanes([(0, 9), (1, 3), (2, 4)], nest=True)
    [0, 0, 1]
    """
    found = [0] * len(spans)
    open_ends: list[list[float]] = []  # for each lane, the ends of its open spans, outermost first
    for index in sorted(range(len(spans)), key=lambda i: (spans[i][0], -spans[i][1])):
        begun, ended = spans[index]
        found[index] = lane = _lane_for(open_ends, begun, ended, nest)
        open_ends[lane].append(ended)
    return found


def _lane_for(open_ends: list[list[float]], begun: float, ended: float, nest: bool) -> int:
    for lane, ends in enumerate(open_ends):
        while ends and ends[-1] <= begun:
            ends.pop()
        if not ends or (nest and ended <= ends[-1]):
            return lane
    open_ends.append([])
    return len(open_ends) - 1


def nesting_faults(events: Iterable[TraceEvent]) -> list[str]:
    """Returns the faults that Perfetto would report; an empty list if there are none.

    Slices of a thread must nest (google/perfetto#4280). Each begin event (`b`) needs a later end
    event (`e`) with the same category, identifier and name. Inner intervals end first.

    >>> inner = slice_event("b", 1.0, 3.0, pid=0, tid=0)
    >>> nesting_faults([slice_event("a", 0.0, 2.0, pid=0, tid=0), inner])
    ["thread (0, 0): 'b' begins inside 'a' and ends after it"]
    """
    slices: dict[tuple[Any, Any], list[TraceEvent]] = {}
    pairs: dict[tuple[Any, ...], list[TraceEvent]] = {}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append(event)
        elif event["ph"] in ("b", "e"):
            pairs.setdefault((event["pid"], event["cat"], event["id"]), []).append(event)
    faults: list[str] = []
    for thread, found in slices.items():
        faults += _slice_faults(thread, found)
    for key, found in pairs.items():
        faults += _pair_faults(key, found)
    return faults


def _slice_faults(thread: tuple[Any, Any], slices: list[TraceEvent]) -> Iterator[str]:
    open_slices: list[tuple[float, str]] = []
    for each in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        ended = round(each["ts"] + each["dur"], 3)
        if each["dur"] < 0:
            yield f"thread {thread}: {each['name']!r} ends before it begins"
        while open_slices and open_slices[-1][0] <= each["ts"]:
            open_slices.pop()
        if open_slices and ended > open_slices[-1][0]:
            yield (
                f"thread {thread}: {each['name']!r} begins inside {open_slices[-1][1]!r} and ends "
                "after it"
            )
        open_slices.append((ended, each["name"]))


def _pair_faults(key: tuple[Any, ...], events: list[TraceEvent]) -> Iterator[str]:
    open_events: list[TraceEvent] = []
    for event in sorted(events, key=lambda event: float(event["ts"])):
        if event["ph"] == "b":
            open_events.append(event)
        elif not open_events or open_events[-1]["name"] != event["name"]:
            yield f"async {key}: the end of {event['name']!r} has no begin"
        else:
            open_events.pop()
    for event in open_events:
        yield f"async {key}: the begin of {event['name']!r} has no end"


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)

"""Adds the slices of traces of `torch.profiler` to the trace of all ranks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unisono.chrome_trace import TraceEvent, lanes, thread_name
from unisono.timeline.aligned_ranks import AlignedRank

_FIRST_ROW: Final = 1000
_LANES: Final = 50  # maximum number of rows of one thread
_GZIP: Final = b"\x1f\x8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTrace:
    """The trace of one process, which `export_chrome_trace` of `torch.profiler` wrote."""

    path: str
    base_ns: int
    """Unix time in ns that corresponds to time 0 in the file."""
    rank: int | None
    """The rank, or None if the file does not contain it."""
    events: Sequence[Mapping[str, Any]]

    @staticmethod
    def load(path: Path) -> TorchTrace:
        """Reads a file, compressed or not. Raises `ValueError` with the file's path if the file
        cannot be read as a trace of torch.profiler."""
        try:
            content = path.read_bytes()
            if content[:2] == _GZIP:
                content = gzip.decompress(content)
            found = json.loads(content)
            return TorchTrace(
                path=str(path),
                base_ns=int(found.get("baseTimeNanoseconds", 0)),
                rank=found.get("distributedInfo", {}).get("rank"),
                events=[each for each in found["traceEvents"] if _is_slice(each)],
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: expected a trace of torch.profiler: {error!r}") from error


def _is_slice(event: Mapping[str, Any]) -> bool:
    return event.get("ph") == "X" and isinstance(event.get("pid"), int) and "dur" in event


def torch_events(
    traces: Sequence[TorchTrace], ranks: Sequence[tuple[int, AlignedRank]], base_ns: int
) -> Iterator[TraceEvent]:
    """Yields the slices of torch's traces as events, in additional rows of the ranks' processes.

    `ranks` has each rank with its process number in the trace. Torch's times are times of the
    host's calendar clock. They are translated with the rank's own comparison of calendar clock and
    monotonic clock. Overlapping slices that do not nest get separate rows. Raises `ValueError` for
    a trace that belongs to none of the ranks.

    >>> list(torch_events([], [], 0))
    []
    """
    for trace in traces:
        pid, rank = _owner(trace, ranks)
        by_thread: dict[Any, list[Mapping[str, Any]]] = {}
        for event in trace.events:
            by_thread.setdefault(event["tid"], []).append(event)
        for index, (thread, events) in enumerate(by_thread.items()):
            row = _FIRST_ROW + _LANES * index
            yield from _thread_events(trace, rank, base_ns, events, (pid, row, f"torch {thread}"))


def _owner(trace: TorchTrace, ranks: Sequence[tuple[int, AlignedRank]]) -> tuple[int, AlignedRank]:
    processes = {event["pid"] for event in trace.events}
    for pid, rank in ranks:
        if trace.rank == rank.dump.rank if trace.rank is not None else rank.dump.pid in processes:
            return pid, rank
    raise ValueError(
        f"{trace.path}: expected the trace of a process whose timeline is given; found processes "
        f"{sorted(processes)}, rank {trace.rank}"
    )


def _thread_events(
    trace: TorchTrace,
    rank: AlignedRank,
    base_ns: int,
    events: Sequence[Mapping[str, Any]],
    where: tuple[int, int, str],
) -> Iterator[TraceEvent]:
    pid, row, title = where
    spans: list[tuple[float, float]] = []
    for event in events:
        begun_us = _translated_us(trace, rank, base_ns, float(event["ts"]))
        spans.append((begun_us, round(begun_us + float(event["dur"]), 3)))
    used = lanes(spans, nest=True)
    for lane in sorted(set(used)):
        yield from thread_name(pid, row + lane, title)
    for event, (begun_us, ended_us), lane in zip(events, spans, used, strict=True):
        times = {"ts": begun_us, "dur": round(ended_us - begun_us, 3)}
        args = {"args": event["args"]} if "args" in event else {}
        kept = {"name": event.get("name", ""), "cat": event.get("cat", "torch"), **args}
        yield {"ph": "X", **kept, "pid": pid, "tid": row + lane, **times}


def _translated_us(trace: TorchTrace, rank: AlignedRank, base_ns: int, ts_us: float) -> float:
    wall_ns = trace.base_ns + round(1e3 * ts_us)
    own_ns = wall_ns - rank.dump.wall_ns + rank.dump.now_ns
    return round((rank.unix_ns(own_ns) - base_ns) / 1e3, 3)

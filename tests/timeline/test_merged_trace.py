"""The trace of all ranks: it nests for all events, and it names missing data."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeline.scripted_timeline import (
    MS,
    collective,
    in_order,
    phase,
    scripted_dump,
    wait,
)
from unisono.chrome_trace import nesting_faults
from unisono.timeline import (
    ClockReading,
    EventKind,
    RankDump,
    TimelineWriter,
    TorchTrace,
    load_dumps,
    merge_dumps,
    missing_ranks,
    save_dumps,
    spans_of,
)

NAMES = ("a", "b", "forward", "backward")
EVENTS = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.sampled_from(EventKind),
        st.sampled_from(NAMES),
        st.integers(1, 4),
        st.integers(0, 2),
        st.integers(0, 30),
    ),
    max_size=60,
)


def merged(*dumps: RankDump, **others: Any) -> dict[str, Any]:
    found = json.loads(merge_dumps(dumps, **others))
    assert nesting_faults(found["traceEvents"]) == []
    for event in found["traceEvents"]:
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
    return found


def named(trace: dict[str, Any], name: str, ph: str = "X") -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["name"] == name and e["ph"] == ph]


def close(microseconds: Any) -> Any:
    """Returns a value that equals any number within 0.001 us, since times are doubles with three
    decimals.
    """
    return pytest.approx(microseconds, abs=1e-3)


@given(events=EVENTS, entries=st.sampled_from([64, 4096]))
def test_any_events_give_a_trace_that_nests(events: list[tuple], entries: int) -> None:
    """Tests that any events give a trace that nests, even events that no program makes. Such events
    can remain in the ring buffer after it has lost older events.
    """
    script = [
        (at, kind, name, number, value, min(begun, at), at)
        for at, kind, name, number, value, begun in sorted(events, key=lambda each: each[0])
    ]
    with tempfile.TemporaryDirectory() as folder:
        dump = scripted_dump(Path(folder), script, events=entries)
    merged(dump)


def test_a_step_has_its_phases_waits_collectives_and_tensors(tmp_path: Path) -> None:
    events = in_order(
        phase("forward", 1, 0, 10),
        phase("backward", 1, 10, 30),
        collective(1, "w", 15, (18, 33)),
        [wait("w", 30, 33)],
        phase("optimizer", 1, 33, 35),
    )
    trace = merged(scripted_dump(tmp_path, events, rank=3, size=4))
    [forward] = named(trace, "forward")
    [moved] = [e for e in named(trace, "w") if e["cat"] == "collectives"]
    assert forward["pid"] == 3 and forward["args"] == {"step": 1, "whole": True}
    assert forward["dur"] == 10_000
    assert (moved["ts"] - forward["ts"], moved["dur"]) == close((18_000, 15_000))
    assert moved["args"]["bytes"] == 4000 and moved["args"]["tensors"] == ["w"]
    [waits] = named(trace, "waits for w")
    assert (waits["ts"] - forward["ts"], waits["dur"]) == close((30_000, 3_000))
    [tensor_begin] = list(named(trace, "w", "b"))
    [tensor_end] = list(named(trace, "w", "e"))
    open_us = (tensor_begin["ts"] - forward["ts"], tensor_end["ts"] - forward["ts"])
    assert open_us == close((15_000, 33_000))
    assert len(named(trace, "is moved", "b")) == 1
    assert trace["otherData"]["missing_ranks"] == [0, 1, 2]


def test_overlapping_collectives_get_rows_of_their_own(tmp_path: Path) -> None:
    events = in_order(collective(1, "a", 0, (0, 10)), collective(2, "b", 5, (5, 15)))
    trace = merged(scripted_dump(tmp_path, events))
    rows = {name: named(trace, name)[0]["tid"] for name in ("a", "b")}
    assert rows["a"] != rows["b"]
    labels = {e["tid"]: e["args"]["name"] for e in named(trace, "thread_name", "M")}
    assert labels[rows["a"]] == labels[rows["b"]] == "collectives"


def test_a_tensor_that_waits_is_open_up_to_the_last_event(tmp_path: Path) -> None:
    events = [(1, EventKind.SUBMITTED, "w", 0, 8), (9, EventKind.FAILED, "PeerLostError")]
    trace = merged(scripted_dump(tmp_path, events))
    [begin], [end] = (named(trace, "waits for other ranks", ph) for ph in "be")
    assert end["ts"] - begin["ts"] == close(8_000)
    [mark] = named(trace, "PeerLostError", "i")
    assert mark["ts"] == end["ts"]


def test_a_void_collective_returns_its_tensors_to_waiting(tmp_path: Path) -> None:
    events = in_order(
        [(0, EventKind.SUBMITTED, "w", 0, 8)],
        [(1, EventKind.LAUNCHED, "w", 1), (1, EventKind.FUSED, "w", 1, 8)],
        [(2, EventKind.TRANSFERRED, "w", 1, 0, 1, 2)],
        [(5, EventKind.LAUNCHED, "w", 2), (5, EventKind.FUSED, "w", 2, 8)],
        [(8, EventKind.TRANSFERRED, "w", 2, 1, 6, 8)],
    )
    dump = scripted_dump(tmp_path, events)
    [tensor] = spans_of(dump).tensors
    assert tensor.submitted_ns == 0 and tensor.nbytes == 8
    assert tensor.collective is not None and tensor.collective.number == 2
    merged(dump)


def test_a_bucket_of_a_plan_has_its_tensors_even_if_they_are_recorded_later(tmp_path: Path) -> None:
    events = in_order(
        [(0, EventKind.SUBMITTED, "a", 0, 8), (1, EventKind.SUBMITTED, "b", 0, 16)],
        [(2, EventKind.LAUNCHED, "a", 5, 3), (4, EventKind.TRANSFERRED, "a", 5, 1, 3, 4)],
        [(6, EventKind.LAUNCHED, "x", 6, 4), (7, EventKind.TRANSFERRED, "x", 6, 1, 6, 7)],
        [(8, EventKind.PLANNED, "a", 3, 8), (8, EventKind.PLANNED, "b", 3, 16)],
    )
    dump = scripted_dump(tmp_path, events)
    first, unknown = spans_of(dump).collectives
    assert (first.tensors, first.nbytes) == (["a", "b"], 24)
    assert (unknown.tensors, unknown.nbytes) == (["x"], 0)  # only the first tensor's name is known
    assert [(t.name, t.submitted_ns) for t in spans_of(dump).tensors] == [
        ("a", 0), ("b", MS), ("x", 6 * MS),
    ]  # fmt: skip
    merged(dump)


def test_a_wrapped_ring_cuts_what_it_has_lost(tmp_path: Path) -> None:
    steps = [
        each
        for step in range(50)
        for each in (
            *phase("forward", step, 10 * step, 10 * step + 3),
            *phase("backward", step, 10 * step + 3, 10 * step + 8),
        )
    ]
    dump = scripted_dump(tmp_path, steps[:-1], events=64)  # the last backward pass has not ended
    assert dump.lost == 199 - 64
    trace = merged(dump)
    phases = spans_of(dump).phases
    assert not phases[0].whole and not phases[-1].whole
    assert all(each.whole for each in phases[1:-1])
    assert trace["otherData"]["ranks"][0]["lost_events"] == dump.lost


def test_a_missing_rank_is_named_in_all_jobs(tmp_path: Path) -> None:
    dumps = [
        scripted_dump(tmp_path, [(1, EventKind.SUBMITTED, "x")], rank=r, size=3, job=job)
        for job, ranks in (("one", (0, 2)), ("two", (0, 1, 2)))
        for r in ranks
    ]
    assert missing_ranks(dumps) == {"one": (1,)}
    trace = merged(*dumps)
    assert trace["otherData"]["missing_ranks"] == [1]
    titles = {e["pid"]: e["args"]["name"] for e in named(trace, "process_name", "M")}
    # two ranks have number 0, but all process numbers differ
    assert sorted(titles) == [0, 1, 2, 3, 4]


def test_numbers_are_exact_in_readers_that_keep_doubles(tmp_path: Path) -> None:
    dumps = [
        scripted_dump(tmp_path, phase("forward", 1, 1, 1 + 1e-6 * r), rank=r, size=2, clock=clock)
        for r, clock in ((0, "a"), (1, "b"))
    ]
    text = merge_dumps(dumps)
    exact, doubled = json.loads(text), json.loads(text, parse_int=float)
    assert exact["baseTimeNanoseconds"] == int(doubled["baseTimeNanoseconds"]) > 1 << 53
    for a, b in zip(exact["traceEvents"], doubled["traceEvents"], strict=True):
        assert a.get("ts") == b.get("ts")
    assert named(exact, "forward")[1]["dur"] == 0.001


def test_ten_seconds_between_clocks_disappear_in_the_trace(tmp_path: Path) -> None:
    """Tests that two ranks that begin at the same time also do so in the trace, although rank 1's
    clock is 10 s behind rank 0's. This offset is known within 1 us.
    """
    late_ms = 10_000
    timelines = []
    for rank, shift in ((0, late_ms), (1, 0)):
        events = phase("forward", 1, 5 + shift, 7 + shift)
        dump = scripted_dump(tmp_path, events, rank=rank, size=2, clock="ab"[rank])
        timelines.append(dump)
    reading = ClockReading(at_ns=5 * MS, offset_ns=late_ms * MS, error_ns=1000, reference="a")
    shifted = RankDump(
        **{name: getattr(timelines[1], name) for name in RankDump.__slots__ if name != "readings"},
        readings=(reading,),
    )
    trace = merged(timelines[0], shifted)
    first, second = named(trace, "forward")
    assert first["ts"] == second["ts"]
    [_, facts] = trace["otherData"]["ranks"]
    assert 1.0 <= facts["clock_error_us"] <= 1.3


def test_dumps_travel_in_one_file(tmp_path: Path) -> None:
    timelines = [
        TimelineWriter(rank=r, size=2, events=64, folder=tmp_path / "own") for r in range(2)
    ]
    for timeline in timelines:
        timeline.record(EventKind.SUBMITTED, "x", timeline.rank)
    contents = [t.path.read_bytes() for t in timelines if t.path is not None]
    save_dumps(tmp_path / "all.dump", contents)
    (tmp_path / "one.timeline").write_bytes(contents[1])
    found = load_dumps([tmp_path / "all.dump", tmp_path / "one.timeline"])
    assert [dump.rank for dump in found] == [0, 1, 1]
    assert [int(dump.events["number"][0]) for dump in found] == [0, 1, 1]
    assert (tmp_path / "all.dump").stat().st_size < 10_000
    (tmp_path / "bad").write_text("{}")
    for wrong in ("bad", "none"):
        with pytest.raises(ValueError, match=f"{wrong}: "):
            load_dumps([tmp_path / wrong])


def test_no_dump_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        merge_dumps([])


def torch_trace(folder: Path, dump: RankDump, **facts: Any) -> TorchTrace:
    """Returns a trace in which an operator starts 3 ms after the rank's clock shows 0."""
    base_ns = 1_700_000_000_000_000_000
    ts = (dump.wall_ns - dump.now_ns - base_ns) / 1e3
    events = [
        {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 5, "ts": ts + 3000, "dur": 4000.0},
        {"ph": "X", "name": "aten::inner", "pid": 77, "tid": 5, "ts": ts + 3500, "dur": 100.0},
        {"ph": "X", "name": "crossing", "pid": 77, "tid": 5, "ts": ts + 6000, "dur": 4000.0},
        {"ph": "M", "name": "process_name", "pid": 77, "args": {"name": "python"}},
    ]
    document = {"baseTimeNanoseconds": base_ns, "traceEvents": events, **facts}
    path = folder / "torch.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return TorchTrace.load(path)


def test_ranges_of_torch_are_merged_and_nest(tmp_path: Path) -> None:
    dump = scripted_dump(tmp_path, phase("forward", 1, 0, 5), rank=1, size=2)
    other = scripted_dump(tmp_path, phase("forward", 1, 0, 5), rank=0, size=2)
    torch = torch_trace(tmp_path, dump, distributedInfo={"rank": 1})
    trace = merged(other, dump, torch_traces=[torch])
    forward = named(trace, "forward")[1]
    [mm], [inner], [crossing] = (
        named(trace, name) for name in ("aten::mm", "aten::inner", "crossing")
    )
    assert mm["pid"] == forward["pid"] == 1
    # doubles of this size have steps of 0.25 us
    assert mm["ts"] - forward["ts"] == pytest.approx(3000, abs=1)
    assert mm["tid"] == inner["tid"] != crossing["tid"]


def test_ranges_of_an_unknown_process_are_refused(tmp_path: Path) -> None:
    dump = scripted_dump(tmp_path, phase("forward", 1, 0, 5))
    with pytest.raises(ValueError, match=r"processes \[77\], rank None"):
        merge_dumps([dump], [torch_trace(tmp_path, dump)])
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ValueError, match=r"bad.json: expected a trace of torch"):
        TorchTrace.load(tmp_path / "bad.json")

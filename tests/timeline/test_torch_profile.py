"""A real trace of torch.profiler, merged: its operators are inside the phase in which they ran."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from unisono.chrome_trace import nesting_faults
from unisono.timeline import EventKind, TimelineWriter, TorchTrace, merge_dumps

torch = pytest.importorskip("torch")

GAP_S = 0.02
"""Time between the phase and what lies outside of it."""


def test_operators_lie_in_the_phase_in_which_they_ran(tmp_path: Path) -> None:
    timeline = TimelineWriter(rank=0, size=1, events=64, folder=tmp_path)
    x = torch.ones(64, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.mm(x, x)
        time.sleep(GAP_S)
        timeline.record(EventKind.BEGUN, "forward", 1)
        for _ in range(3):
            torch.addmm(x, x, x)
        timeline.record(EventKind.ENDED, "forward", 1)
        time.sleep(GAP_S)
        torch.mm(x, x)
    path = tmp_path / "profile.json"
    profile.export_chrome_trace(str(path))
    trace = json.loads(merge_dumps([timeline.dump()], [TorchTrace.load(path)]))
    assert nesting_faults(trace["traceEvents"]) == []
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    [forward] = [event for event in slices if event["name"] == "forward"]
    inside = [event for event in slices if event["name"] == "aten::addmm"]
    outside = [event for event in slices if event["name"] == "aten::mm"]
    assert len(inside) == 3 and len(outside) == 2
    slack_us = 1e6 * GAP_S / 2  # tolerance between the calendar clock and the monotonic clock
    begun, ended = forward["ts"] - slack_us, forward["ts"] + forward["dur"] + slack_us
    assert all(begun <= each["ts"] <= each["ts"] + each["dur"] <= ended for each in inside)
    assert outside[0]["ts"] + outside[0]["dur"] <= begun
    assert outside[1]["ts"] >= ended

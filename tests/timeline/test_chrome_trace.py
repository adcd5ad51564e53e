"""Traces in the Trace Event Format: rows, nesting, and numbers that readers store exactly."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.chrome_trace import (
    async_events,
    lanes,
    nesting_faults,
    slice_event,
    trace_text,
)

SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 15)).map(lambda pair: (pair[0], sum(pair))),
    max_size=25,
)


def slices(spans: list[tuple[int, int]], found: list[int]) -> list[dict]:
    return [
        slice_event(str(i), begun / 1e9, ended / 1e9, pid=0, tid=lane)
        for i, ((begun, ended), lane) in enumerate(zip(spans, found, strict=True))
    ]


@given(SPANS, st.booleans())
def test_spans_in_lanes_nest(spans: list[tuple[int, int]], nest: bool) -> None:
    found = lanes(spans, nest=nest)
    assert nesting_faults(slices(spans, found)) == []
    if nest:
        return
    for (a, lane_a), (b, lane_b) in combinations(zip(spans, found, strict=True), 2):
        if lane_a == lane_b and a[0] < a[1] and b[0] < b[1]:
            assert a[1] <= b[0] or b[1] <= a[0]


@given(SPANS)
def test_lanes_without_nesting_are_the_fewest(spans: list[tuple[int, int]]) -> None:
    spans = [span for span in spans if span[0] < span[1]]
    deepest = max((sum(b <= t < e for b, e in spans) for t in range(60)), default=0)
    assert len(set(lanes(spans))) == deepest


@given(SPANS)
def test_the_check_finds_every_crossing_pair(spans: list[tuple[int, int]]) -> None:
    spans = [span for span in spans if span[0] < span[1]]
    crossing = any(
        a[0] < b[0] < a[1] < b[1] or b[0] < a[0] < b[1] < a[1] for a, b in combinations(spans, 2)
    )
    assert bool(nesting_faults(slices(spans, [0] * len(spans)))) == crossing


def test_async_intervals_need_their_ends_innermost_first() -> None:
    outer = async_events("a", 0.0, 2.0, pid=0, key="1", cat="x")
    inner = async_events("b", 0.5, 1.0, pid=0, key="1", cat="x")
    late = async_events("b", 0.5, 3.0, pid=0, key="1", cat="x")
    assert nesting_faults([outer[0], *inner, outer[1]]) == []
    assert nesting_faults([*outer, *late]) != []
    assert nesting_faults(outer[:1]) != []
    assert nesting_faults(outer[1:]) != []


def test_times_keep_their_nanoseconds() -> None:
    day_s = 86_400.0
    event = slice_event("a", day_s + 1e-9, day_s + 3e-9, pid=0, tid=0)
    assert event["ts"] == 86_400_000_000.001 and event["dur"] == 0.002


def test_the_base_survives_readers_that_keep_doubles() -> None:
    base_ns = 1_795_000_000_000_000_000  # larger than 2^53, up to which doubles hold all integers
    text = trace_text([], base_ns=base_ns)
    found = json.loads(text, parse_int=float)["baseTimeNanoseconds"]
    assert int(found) == base_ns
    with pytest.raises(ValueError, match="whole seconds"):
        trace_text([], base_ns=base_ns + 1)

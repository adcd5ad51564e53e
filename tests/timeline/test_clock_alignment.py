"""Alignment of different clocks: measured offsets, stated errors, and bounds that must hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranks import Threads
from timeline.scripted_timeline import scripted_dump
from unisono import Communicator
from unisono.timeline import (
    ClockAlignment,
    ClockReading,
    EventKind,
    RankDump,
    TimelineWriter,
    align_ranks,
    compare_clocks,
)
from unisono.timeline.clock_offset import DRIFT

TEN_S = 10_000_000_000


class TwoHosts:
    """A communicator that reports each rank as on a separate host."""

    def __init__(self, comm: Communicator) -> None:
        self.rank = comm.rank
        self.hosts = tuple((rank,) for rank in range(comm.size))
        self.send = comm.send
        self.recv = comm.recv


def record_with_shifted_clock(
    comm: Communicator, folder: Path, shifts_ns: tuple[int, ...]
) -> tuple[RankDump, int]:
    shift_ns = shifts_ns[comm.rank]

    def now_ns() -> int:
        return time.monotonic_ns() + shift_ns

    clock = f"clock of {comm.rank}"
    timeline = TimelineWriter(
        rank=comm.rank, size=comm.size, events=64, folder=folder, now_ns=now_ns, clock=clock
    )
    found = compare_clocks(TwoHosts(comm), now_ns, clock)
    if found is not None:
        timeline.note_clock(found)
    timeline.record(EventKind.SUBMITTED, "x")
    dump = timeline.dump()
    return dump, int(dump.events["time_ns"][0]) - shift_ns


def test_clocks_ten_seconds_apart_are_aligned_within_the_stated_error(
    threads: Callable[[int], Threads], tmp_path: Path
) -> None:
    shifts_ns = (0, TEN_S, -TEN_S)
    found = threads(3).run(record_with_shifted_clock, tmp_path, shifts_ns)
    aligned = align_ranks([dump for dump, _ in found])
    truth = {dump.rank: true_ns for dump, true_ns in found}
    for rank in aligned:
        own_ns = int(rank.dump.events["time_ns"][0])
        assert rank.error_ns is not None
        common_ns = rank.alignment.to_common_ns(own_ns)
        assert abs(common_ns - truth[rank.dump.rank]) <= rank.error_ns < TEN_S / 1000
    assert aligned[0].error_ns == 0  # rank 0 has the common clock


def test_ranks_of_one_host_take_part_only_by_their_first() -> None:
    asked: list[int] = []
    comm: Any = SimpleNamespace(rank=3, hosts=((0, 1), (2, 3)), send=asked.append)
    assert compare_clocks(comm, time.monotonic_ns, "c") is None
    comm.rank = 1
    assert compare_clocks(comm, time.monotonic_ns, "c") is None
    assert asked == []


@given(
    offset_ns=st.integers(-TEN_S, TEN_S),
    outward_ns=st.integers(0, 10_000_000),
    back_ns=st.integers(0, 10_000_000),
)
def test_half_of_the_round_trip_bounds_the_error(
    offset_ns: int, outward_ns: int, back_ns: int
) -> None:
    """Tests that the measured offset of a clock is wrong by at most the stated error. Messages take
    any time in each direction, on a simulated clock.
    """
    clock = SimpleNamespace(now_ns=1000)

    def send(x: Any, dst: int, tag: int = 0) -> None:
        clock.now_ns += outward_ns

    def recv(x: Any, src: int, tag: int = 0) -> None:
        if x.dtype != "uint8":
            x[0] = clock.now_ns + offset_ns  # the time at which the question arrives
            clock.now_ns += back_ns

    comm: Any = SimpleNamespace(rank=1, hosts=((0,), (1,)), send=send, recv=recv)
    reading = compare_clocks(comm, lambda: clock.now_ns, "mine")
    assert reading is not None
    assert abs(reading.offset_ns - offset_ns) <= reading.error_ns <= outward_ns + back_ns + 1


def reading(at_ns: int, offset_ns: int, error_ns: int = 10, reference: str = "a") -> ClockReading:
    return ClockReading(at_ns=at_ns, offset_ns=offset_ns, error_ns=error_ns, reference=reference)


def test_drift_is_interpolated_between_two_comparisons_and_stated_after_them() -> None:
    alignment = ClockAlignment(readings=(reading(0, 1000), reading(10**9, 3000)))
    assert alignment.to_common_ns(0) == 1000
    assert alignment.to_common_ns(5 * 10**8) == 5 * 10**8 + 2000
    assert alignment.to_common_ns(10**9) == 10**9 + 3000
    assert alignment.to_common_ns(2 * 10**9) == 2 * 10**9 + 3000
    assert alignment.error_ns(0) == 10
    assert alignment.error_ns(2 * 10**9) == 10 + round(DRIFT * 10**9)


def test_ranks_with_one_clock_share_its_comparison(tmp_path: Path) -> None:
    first = [(1, EventKind.SUBMITTED, "x")]
    timelines = [
        TimelineWriter(rank=r, size=4, events=64, folder=tmp_path, clock="ab"[r // 2])
        for r in range(4)
    ]
    for timeline in timelines:
        timeline.record(*first[0][1:])
    timelines[2].note_clock(reading(0, TEN_S))
    aligned = align_ranks([timeline.dump() for timeline in timelines])
    assert [rank.alignment.to_common_ns(5) for rank in aligned] == [5, 5, TEN_S + 5, TEN_S + 5]
    assert all(rank.alignment.measured for rank in aligned)


def test_comparisons_add_up_along_a_chain_in_both_directions(tmp_path: Path) -> None:
    timelines = [
        TimelineWriter(rank=r, size=4, events=64, folder=tmp_path, clock="abcd"[r])
        for r in range(4)
    ]
    timelines[1].note_clock(reading(0, 100, 1, "a"))
    timelines[2].note_clock(reading(0, 1000, 2, "b"))
    timelines[3].note_clock(reading(0, 7, 1, "a"))
    aligned = align_ranks([timeline.dump() for timeline in timelines])
    assert [rank.alignment.to_common_ns(0) for rank in aligned] == [0, 100, 1100, 7]
    assert [rank.alignment.error_ns(0) for rank in aligned[:3]] == [0, 1, 3]
    # Rank 0's clock is the common clock, even if rank 0's dump is missing.
    rest = align_ranks([timeline.dump() for timeline in timelines[1:]])
    assert [rank.alignment.to_common_ns(0) for rank in rest] == [100, 1100, 7]


def test_a_comparison_also_leads_backwards(tmp_path: Path) -> None:
    """Tests that clock b can be aligned to the common clock a if a was compared with b, and not b
    with a.
    """
    timelines = [
        TimelineWriter(rank=r, size=4, events=64, folder=tmp_path, clock="abcd"[r])
        for r in range(4)
    ]
    timelines[0].note_clock(reading(10, 50, 3, "b"))
    timelines[2].note_clock(reading(0, 100, 1, "a"))
    timelines[3].note_clock(reading(0, 200, 1, "a"))
    first, second, *_ = align_ranks([timeline.dump() for timeline in timelines])
    assert first.alignment.to_common_ns(7) == 7
    assert second.alignment.to_common_ns(60) == 10
    assert second.alignment.measured and second.alignment.error_ns(60) == 3


def test_clocks_that_were_never_compared_use_the_calendar_and_say_so(tmp_path: Path) -> None:
    events = [(1, EventKind.SUBMITTED, "x")]
    dumps = [
        scripted_dump(tmp_path, events, rank=r, size=2, clock=clock)
        for r, clock in enumerate(("a", "b"))
    ]
    first, second = align_ranks(dumps)
    assert first.error_ns == 0 and second.error_ns is None
    by_calendar = dumps[1].wall_ns - dumps[0].wall_ns  # the times at which both clocks show 0
    assert second.unix_ns(0) - first.unix_ns(0) == by_calendar


def test_readings_keep_the_first_and_the_last(tmp_path: Path) -> None:
    timeline = TimelineWriter(rank=0, size=1, events=64, folder=tmp_path)
    for at_ns in (1, 2, 3):
        timeline.note_clock(reading(at_ns, 0))
    assert [each.at_ns for each in timeline.dump().readings] == [1, 3]


@pytest.mark.parametrize("size", [1, 2])
def test_one_host_compares_nothing(threads: Callable[[int], Threads], size: int) -> None:
    found = threads(size).run(lambda comm: compare_clocks(comm, time.monotonic_ns, "c"))
    assert found == [None] * size

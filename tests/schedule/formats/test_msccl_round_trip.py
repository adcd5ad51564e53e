"""MSCCL XML: written files can be read back; damaged files are rejected or still correct."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases_in_turn import turn
from unisono.algorithms import build, names
from unisono.errors import ScheduleError, UnsupportedError
from unisono.schedule import (
    Builder,
    Collective,
    Schedule,
    check,
    from_msccl_xml,
    to_msccl_xml,
    trace,
)
from unisono.schedule.formats.buffers import Buffers, operation, pieces
from unisono.schedule.formats.msccl import run_program
from unisono.schedule.formats.msccl_file import parse
from unisono.types import Op

FILES = os.environ.get("UNISONO_TEST_MSCCL", "")


LACKING = (Op.BARRIER, Op.SCAN, Op.EXSCAN)
ALL = [(op, name) for op in Op if op not in LACKING for name in names(op)]


@pytest.mark.parametrize(("op", "name"), ALL)
def test_written_files_are_read_back(op: Op, name: str) -> None:
    for ranks in (1, 2, 3, 4, 5):
        with turn(ranks=ranks):
            comes_back(build(op, name, ranks=ranks, root=ranks - 1))


def comes_back(schedule: Schedule) -> None:
    op, ranks = schedule.collective.op, schedule.collective.ranks
    text = to_msccl_xml(schedule)
    same_effect(schedule, from_msccl_xml(text))
    # The program must also run if each connection holds only one message.
    program = parse(text)
    parts = program.chunks // pieces(op, ranks)
    root = ranks - 1 if op.rooted else None
    collective = Collective(op=operation(program.collective), ranks=ranks, parts=parts, root=root)
    run_program(program, Buffers(collective, in_place=program.in_place), room=1)


def same_effect(before: Schedule, after: Schedule) -> None:
    """Checks that collective, proof, rounds, and the chunks that each rank sends are equal."""
    check(after)
    assert after.collective == before.collective
    assert after.num_rounds <= before.num_rounds
    for rank in range(before.collective.ranks):
        assert after.chunks_sent(rank) == before.chunks_sent(rank)


@pytest.mark.parametrize("op", LACKING)
def test_operations_missing_in_the_format_are_rejected(op: Op) -> None:
    with pytest.raises(UnsupportedError, match=f"cannot express {op}"):
        to_msccl_xml(build(op, names(op)[0], ranks=2))


def test_names_are_escaped_in_xml() -> None:
    b = Builder(Collective(op=Op.BROADCAST, ranks=2, root=0), 'a<b "c" & d')
    b.copy(0, 0, 1)
    assert from_msccl_xml(to_msccl_xml(b.build())).algorithm == 'a<b "c" & d'


@st.composite
def right_schedules(draw: st.DrawFn) -> Schedule:
    """Draws correct all_reduces that begin with random copies and reductions into scratch."""
    ranks, parts, scratch = draw(st.integers(2, 4)), draw(st.integers(1, 3)), 2
    b = Builder(Collective(op=Op.ALL_REDUCE, ranks=ranks, parts=parts), "random", scratch=scratch)
    locations = st.integers(0, parts + scratch - 1)
    rank = st.integers(0, ranks - 1)
    for _ in range(draw(st.integers(0, 12))):
        src, dst = draw(rank), draw(rank)
        at, to = draw(locations), draw(st.integers(parts, parts + scratch - 1))
        trial = copy.deepcopy(b)
        add = trial.reduce if draw(st.booleans()) else trial.copy
        add(src, at, dst, to, channel=draw(st.integers(0, 1)))
        if acceptable(trial.build()):
            b = trial
        if draw(st.booleans()):
            b.next_round()
    b.next_round()
    for part in range(parts):
        collector = draw(rank)
        for other in range(ranks):
            if other != collector:
                b.reduce(other, part, collector, part)
    b.next_round()
    for part in range(parts):
        collector = next(
            t.dst for t in reversed(b.build().transfers) if t.dst_chunk == part and t.reduce
        )
        for other in range(ranks):
            if other != collector:
                b.copy(collector, part, other, part)
    return b.build()


def acceptable(schedule: Schedule) -> bool:
    """Returns True if the schedule is correct, except that results may be missing at the end."""
    try:
        trace(schedule)
    except ScheduleError as error:
        return "at the end" in str(error)
    return True


@settings(max_examples=60, deadline=None)
@given(right_schedules())
def test_any_correct_schedule_survives_a_round_trip(schedule: Schedule) -> None:
    check(schedule)
    after = from_msccl_xml(to_msccl_xml(schedule))
    check(after)
    assert after.collective == schedule.collective


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["ring", "direct", "one_shot"]), st.data())
def test_a_damaged_file_is_rejected_or_still_correct(name: str, data: st.DataObject) -> None:
    text = to_msccl_xml(build("all_reduce", name, ranks=3))
    lines = text.splitlines()
    steps = [i for i, line in enumerate(lines) if "<step" in line]
    at = data.draw(st.sampled_from(steps))
    number = re.search(
        data.draw(st.sampled_from(["srcoff", "dstoff", "depid", "deps"])) + r'="(-?\d+)"', lines[at]
    )
    assert number is not None
    value = data.draw(st.integers(-1, 3))
    lines[at] = lines[at][: number.start(1)] + str(value) + lines[at][number.end(1) :]
    try:
        schedule = from_msccl_xml("\n".join(lines))
    except ScheduleError as error:
        assert "gpu" in str(error)
    else:
        check(schedule)


@pytest.mark.slow
@pytest.mark.skipif(not FILES, reason="UNISONO_TEST_MSCCL names no directory")
def test_real_files_are_proved_or_rejected() -> None:
    for path in sorted(Path(FILES).glob("*.xml")):
        try:
            check(from_msccl_xml(path.read_text()))
        except UnsupportedError as error:
            assert "unsupported operation" in str(error)

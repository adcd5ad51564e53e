"""Schedules are split into moves and assembled again without loss. Parts with equal moves are
joined.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.algorithms import build, names
from unisono.errors import UnsupportedError
from unisono.schedule import Builder, Collective, Schedule, check, coarsen
from unisono.schedule.coarsen import Move, assemble, moves_of
from unisono.types import Op


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in Op for name in names(op)])
def test_a_schedule_equals_its_moves(op: Op, name: str) -> None:
    try:
        schedule = build(op, name, ranks=4)
    except UnsupportedError:
        return
    moves = moves_of(schedule)
    again = assemble(schedule.collective, name, moves, scratch=schedule.scratch)
    assert sorted(moves_of(again)) == sorted(moves)
    check(again)
    check(coarsen(schedule))


def finer(schedule: Schedule, factor: int) -> Schedule:
    """Returns the schedule with each part divided into `factor` parts, and with the moves in random
    order.
    """
    c = schedule.collective
    collective = Collective(op=c.op, ranks=c.ranks, parts=c.parts * factor, root=c.root)
    moves = [
        m._replace(
            src_chunk=m.src_chunk * factor + i, dst_chunk=m.dst_chunk * factor + i, channel=i
        )
        for m in moves_of(schedule)
        for i in range(factor)
    ]
    return assemble(collective, schedule.algorithm, moves)


@given(
    st.sampled_from([Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL]),
    st.integers(2, 4),
    st.integers(2, 5),
)
def test_parts_with_equal_moves_are_joined(op: Op, ranks: int, factor: int) -> None:
    schedule = build(op, "direct", ranks=ranks)
    fine = finer(schedule, factor)
    check(fine)
    coarse = coarsen(fine)
    assert coarse.collective == schedule.collective
    assert sorted(moves_of(coarse)) == sorted(m._replace(channel=0) for m in moves_of(schedule))


def test_parts_with_different_moves_are_not_joined() -> None:
    b = Builder(Collective(op=Op.BROADCAST, ranks=2, parts=6, root=0), "thirds")
    for start in (0, 2, 4):
        b.copy(0, start, 1, count=2)
        b.next_round()
    assert coarsen(b.build()).collective.parts == 3


def test_schedules_that_cannot_be_coarsened_do_not_change() -> None:
    collective = Collective(op=Op.BROADCAST, ranks=2, parts=2, root=0)
    crossing = assemble(collective, "crossing", [Move(0, 0, 1, False, 0, 0, 1)])
    outside = assemble(collective, "outside", [Move(0, 0, 1, False, 0, 0, 8)])
    scratch = assemble(collective, "scratch", [Move(0, 0, 1, False, 0, 0, 0)], scratch=1)
    for schedule in (crossing, outside, scratch):
        assert coarsen(schedule) is schedule

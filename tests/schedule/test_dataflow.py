"""Reductions in rank order, compared with a symbolic computation."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from unisono.algorithms import build, names
from unisono.errors import ScheduleError, UnsupportedError
from unisono.schedule import Builder, Collective, Schedule, folds_in_rank_order
from unisono.types import Op

REDUCING = [op for op in Op if op.reduces]


def brackets(*values: Any) -> Any:
    """Returns ((a, b), c), the brackets of a left-to-right reduction of a, b and c."""
    return functools.reduce(lambda a, b: (a, b), values)


def results(schedule: Schedule) -> dict[tuple[int, int], Any]:
    """Returns the symbolic term of each result. A rank's number represents its contribution."""
    collective = schedule.collective
    state: dict[tuple[int, int], Any] = {
        (rank, chunk): rank
        for rank in range(collective.ranks)
        for chunk in collective.initial(rank)
    }
    for _, transfers in schedule.rounds():
        incoming: dict[tuple[int, int], list[tuple[int, Any]]] = {}
        for t in transfers:
            for i in range(t.count):
                place = t.dst, t.dst_chunk + i
                own = [(t.dst, state[place])] if t.reduce else []
                operands = incoming.setdefault(place, own)
                operands.append((t.src, state[t.src, t.src_chunk + i]))
        for place, operands in incoming.items():
            ordered = sorted(operands, key=lambda operand: operand[0])
            state[place] = brackets(*(term for _, term in ordered))
    return {
        (rank, chunk): state[rank, chunk]
        for rank in range(collective.ranks)
        for chunk in collective.wanted(rank)
    }


@pytest.mark.parametrize("op", REDUCING)
def test_folds_in_rank_order_match_the_computed_terms(op: Op) -> None:
    seen = set()
    for name in names(op):
        for ranks in range(1, 9):
            for root in {0, ranks - 1} if op.rooted else {0}:
                try:
                    schedule = build(op, name, ranks=ranks, root=root)
                except UnsupportedError:
                    continue
                expected = all(
                    term == brackets(*schedule.collective.summands(rank))
                    for (rank, _), term in results(schedule).items()
                )
                assert folds_in_rank_order(schedule) is expected, (name, ranks, root)
                seen.add(expected)
    assert seen == {True, False}, "both cases occur"


def test_operations_without_reductions_are_in_rank_order() -> None:
    for op in (Op.ALL_GATHER, Op.BROADCAST, Op.ALL_TO_ALL, Op.BARRIER):
        assert all(folds_in_rank_order(build(op, name, ranks=4)) for name in names(op))


def test_a_wrong_schedule_has_no_fold_order() -> None:
    nothing = Builder(Collective(op=Op.ALL_REDUCE, ranks=2), "nothing").build()
    with pytest.raises(ScheduleError):
        folds_in_rank_order(nothing)

"""Checks of plans in which ranks read each other's memory directly (single copy)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plain_lowering import plain_lower
from unisono.algorithms import build, names
from unisono.errors import ScheduleError
from unisono.schedule import (
    Code,
    ExecutionPlan,
    Flag,
    Record,
    Ref,
    Schedule,
    Space,
    check_plans,
    lower,
)
from unisono.types import Op

DIRECT = build("all_reduce", "direct", ranks=3)
GATHER = build("all_gather", "ring", ranks=3)


def shared(schedule: Schedule) -> list[ExecutionPlan]:
    return list(lower(schedule, shares_memory=True))


def edited(
    schedule: Schedule, rank: int, edit: Callable[[list[Record]], list[Record]]
) -> list[ExecutionPlan]:
    plans = shared(schedule)
    plans[rank] = replace(plans[rank], records=tuple(edit(list(plans[rank].records))))
    return plans


def drop(records: list[Record], code: Code, nth: int = 0) -> list[Record]:
    at = [i for i, record in enumerate(records) if record.code is code][nth]
    return records[:at] + records[at + 1 :]


@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_single_copy_plans_equal_a_plain_lowering_and_are_proved(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(list(Op)))
    ranks = data.draw(st.integers(1, 9))
    name, root = data.draw(st.sampled_from(names(op))), data.draw(st.integers(0, ranks - 1))
    schedule = build(op, name, ranks=ranks, root=root)
    plans = shared(schedule)
    plain = [
        replace(plan, in_place=plans[plan.rank].in_place)
        for plan in plain_lower(schedule, shares_memory=True)
    ]
    assert plans == plain
    depth = data.draw(st.integers(1, 4))
    in_place = all(plan.in_place for plan in plans)
    lead = data.draw(st.integers(0, 2))
    check_plans(schedule.collective, plans, depth=depth, blocks=3, lead=lead, in_place=in_place)


def test_inputs_and_results_are_shared_and_partial_sums_are_staged() -> None:
    assert all(plan.addresses_only for plan in shared(DIRECT))
    plans = shared(build("all_reduce", "halving_doubling", ranks=4))
    assert not any(plan.addresses_only for plan in plans)
    spaces = {record.src.space for plan in plans for record in plan.records}
    assert spaces >= {Space.SHARED, Space.SLOT}


@pytest.mark.parametrize("name", ["one_shot", "recursive_doubling"])
def test_in_place_requires_finished_readers(name: str) -> None:
    schedule = build("all_reduce", name, ranks=4)
    plans = shared(schedule)
    assert not any(plan.in_place for plan in plans)
    assert all(plan.in_place for plan in lower(schedule))
    check_plans(schedule.collective, plans)
    with pytest.raises(ScheduleError, match="may be overwritten while others read it"):
        check_plans(schedule.collective, plans, in_place=True)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda records: drop(records, Code.WAIT), "SHARED 1.0 of rank 0 may be read before"),
        (lambda records: drop(records, Code.SHARE), "SLOT|SHARED .* may be read before"),
        (
            lambda records: [
                replace(r, flags=r.flags & ~Flag.SHARES) if r.code is Code.REDUCE else r
                for r in records
            ],
            "may be read before it is written",
        ),
        (
            lambda records: [
                replace(r, flags=r.flags & ~Flag.SHARES | Flag.HAS_DST2)
                if r.code is Code.REDUCE
                else r
                for r in records
            ],
            "disagree about single copy",
        ),
        (
            lambda records: [
                replace(r, src=Ref(space=Space.TMP, rank=1)) if r.code is Code.SHARE else r
                for r in records
            ],
            "expected a slot and an input or output, got TMP 0.0",
        ),
        (
            lambda records: [
                replace(r, dst=Ref(space=Space.OUT, rank=1)) if r.code is Code.SHARE else r
                for r in records
            ],
            "expected a slot and",
        ),
    ],
)
def test_a_broken_plan_is_rejected(edit: Callable[[list[Record]], list[Record]], text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        check_plans(DIRECT.collective, edited(DIRECT, 1, edit))


def test_overwriting_a_shared_result_is_rejected() -> None:
    def again(records: list[Record]) -> list[Record]:
        at = next(i for i, record in enumerate(records) if record.flags & Flag.SHARES)
        return [*records[:-1], replace(records[at], flags=Flag.NONE), records[-1]]

    with pytest.raises(ScheduleError, match="may be overwritten while others read it"):
        check_plans(GATHER.collective, edited(GATHER, 0, again))

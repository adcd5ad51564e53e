"""The replay rejects plans that deadlock, race or compute wrong results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from unisono import algorithms
from unisono.algorithms import build
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
from unisono.schedule.replay import _Replay
from unisono.types import Op


def edited(
    schedule: Schedule, rank: int, edit: Callable[[list[Record]], list[Record]]
) -> list[ExecutionPlan]:
    plans = list(lower(schedule))
    records = tuple(edit(list(plans[rank].records)))
    plans[rank] = replace(plans[rank], records=records)
    return plans


def drop(code: Code) -> Callable[[list[Record]], list[Record]]:
    """Returns a function that removes the first record with this code."""

    def edit(records: list[Record]) -> list[Record]:
        at = next(i for i, r in enumerate(records) if r.code is code)
        return records[:at] + records[at + 1 :]

    return edit


def change(code: Code, **fields: object) -> Callable[[list[Record]], list[Record]]:
    """Returns a function that changes fields of the first record with this code."""

    def edit(records: list[Record]) -> list[Record]:
        at = next(i for i, r in enumerate(records) if r.code is code)
        records[at] = replace(records[at], **fields)  # type: ignore[arg-type]
        return records

    return edit


ONE_SHOT = build("all_reduce", "one_shot", ranks=3)
BROADCAST = build("broadcast", "direct", ranks=3)
BROADCAST_STAGES = 2
RING = build("all_gather", "ring", ranks=3)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (drop(Code.WAIT), "rank 1, record 3 .REDUCE., block 0: SLOT 0.0 of rank 0 may be read"),
        (drop(Code.COPY), "SLOT 0.0 of rank 1 may be read before it is written"),
        (drop(Code.ARG), "expected 3 ARG records"),
        (drop(Code.REDUCE), "the output is wrong"),
        (lambda records: records[:-1], "expected POST 2 as the last record"),
        (change(Code.REDUCE, flags=Flag.NONE), "FINAL does not match"),
        (change(Code.REDUCE, nsrc=2), "FINAL does not match"),
        (change(Code.WAIT, value=3), "deadlock: .*rank 1, record 2 .WAIT 0:3., block 0"),
        (change(Code.ARG, src=Ref(space=Space.IN, rank=1)), "operands of several chunks"),
        (change(Code.ARG, src=Ref(space=Space.TMP, rank=1)), "TMP 0.0 of rank 1 is empty"),
        (change(Code.COPY, dst=Ref(space=Space.SLOT, rank=0)), "is not writable"),
        (change(Code.COPY, dst=Ref(space=Space.IN, rank=1)), "is not writable"),
        (change(Code.COPY, dst=Ref(space=Space.SLOT, rank=1, index=1)), "expected a slot below 1"),
        (lambda records: records[:1] + records, "written twice"),
    ],
)
def test_a_broken_plan_is_rejected(edit: Callable[[list[Record]], list[Record]], text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        check_plans(ONE_SHOT.collective, edited(ONE_SHOT, 1, edit))


def test_plans_with_different_stages_are_rejected() -> None:
    plans = list(lower(RING))
    plans[0] = replace(plans[0], stages=9)
    with pytest.raises(ScheduleError, match="different numbers of stages"):
        check_plans(RING.collective, plans)


def test_progress_that_does_not_grow_is_rejected() -> None:
    with pytest.raises(
        ScheduleError, match=r"rank 0, record 3 \(POST 2\), block 0: expected a value"
    ):
        check_plans(
            BROADCAST.collective, edited(BROADCAST, 0, change(Code.POST, value=BROADCAST_STAGES))
        )


def test_a_wait_for_a_post_that_never_happens_is_a_deadlock() -> None:
    with pytest.raises(ScheduleError, match=r"deadlock: .*rank 0, .*block 0"):
        check_plans(RING.collective, edited(RING, 0, change(Code.WAIT, value=4)))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_reusing_a_slot_before_its_readers_finish_is_rejected(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = lower(BROADCAST)
    check_plans(BROADCAST.collective, plans, depth=depth, blocks=6)
    monkeypatch.setattr(_Replay, "_enter", lambda self, rank: True)
    with pytest.raises(ScheduleError, match=r"may be (overwritten|read before)"):
        check_plans(BROADCAST.collective, plans, depth=depth, blocks=6)


@pytest.mark.parametrize("op", [Op.ALL_REDUCE, Op.ALL_TO_ALL, Op.BROADCAST, Op.SCAN])
def test_early_rounds_of_later_blocks_may_run_ahead(op: Op) -> None:
    for name in algorithms.names(op):
        for ranks in (2, 5, 8):
            schedule = algorithms.build(op, name, ranks=ranks)
            plans = lower(schedule)
            for lead in (1, 2, 5):
                check_plans(
                    schedule.collective, plans, depth=lead + 1, blocks=2 * lead + 3, lead=lead
                )

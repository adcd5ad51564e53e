"""Write-back: which schedules permit it, and the proof that their plans are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.algorithms import build, names
from unisono.errors import ScheduleError
from unisono.schedule import (
    Builder,
    Code,
    Collective,
    ExecutionPlan,
    Flag,
    Record,
    Ref,
    Schedule,
    Space,
    check_plans,
    lower,
    lower_rank,
)
from unisono.types import Op

RANKS = 3
DIRECT = build("all_reduce", "direct", ranks=RANKS)


def all_reduce(ranks: int, parts: int = 1) -> Builder:
    return Builder(Collective(op=Op.ALL_REDUCE, ranks=ranks, parts=parts), "test")


def star(ranks: int, root: int = 0) -> Schedule:
    """A schedule in which one rank reduces everything and sends the result to all."""
    b = all_reduce(ranks)
    others = [rank for rank in range(ranks) if rank != root]
    for rank in others:
        b.reduce(rank, 0, root)
    b.next_round()
    for rank in others:
        b.copy(root, 0, rank)
    return b.build()


def relayed(ranks: int) -> Schedule:
    """A star whose result reaches the last rank through another rank."""
    b = all_reduce(ranks)
    for rank in range(1, ranks):
        b.reduce(rank, 0, 0)
    b.next_round()
    for rank in range(1, ranks - 1):
        b.copy(0, 0, rank)
    b.next_round()
    b.copy(1, 0, ranks - 1)
    return b.build()


def crossed() -> Schedule:
    """A schedule of two chunks, of which each rank reduces its own; both copies cross."""
    b = all_reduce(2, parts=2)
    b.reduce(0, 0, 1)
    b.reduce(1, 1, 0)
    b.next_round()
    b.copy(1, 0, 0)
    b.copy(0, 1, 1)
    return b.build()


def both_reduce() -> Schedule:
    """A schedule in which a rank reduces what another rank reduces too."""
    b = all_reduce(2)
    b.reduce(0, 0, 1)
    b.reduce(1, 0, 0)
    return b.build()


def written_back(schedule: Schedule) -> list[ExecutionPlan]:
    return list(lower(schedule, shares_memory=True, may_write_back=True))


def is_written_back(schedule: Schedule) -> bool:
    found = {
        lower_rank(schedule, rank, shares_memory=True, may_write_back=True).writes_back
        for rank in range(schedule.collective.ranks)
    }
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize(
    ("schedule", "yes"),
    [
        (DIRECT, True),
        (star(2), True),
        (star(4, root=2), True),
        (crossed(), True),
        (relayed(4), False),
        (both_reduce(), False),
        (build("all_reduce", "one_shot", ranks=3), False),
        (build("all_reduce", "ring", ranks=3), False),
        (build("all_reduce", "halving_doubling", ranks=4), False),
        (build("reduce_scatter", "direct", ranks=3), False),
        (build("reduce", "direct", ranks=3, root=1), False),
        (build("all_reduce", "direct", ranks=1), False),
    ],
)
def test_schedules_that_permit_it(schedule: Schedule, yes: bool) -> None:
    assert is_written_back(schedule) is yes
    flags = [record.flags for plan in written_back(schedule) for record in plan.records]
    assert any(flag & Flag.WRITES_BACK for flag in flags) is yes
    if yes:
        check_plans(schedule.collective, written_back(schedule), in_place=True)


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_every_plan_is_proved(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 8))
    schedule = build("all_reduce", data.draw(st.sampled_from(names(Op.ALL_REDUCE))), ranks=ranks)
    plans = written_back(schedule)
    if not is_written_back(schedule):
        assert plans == list(lower(schedule, shares_memory=True))
        return
    depth, lead = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 2))
    check_plans(schedule.collective, plans, depth=depth, blocks=3, lead=lead, in_place=True)


@pytest.mark.parametrize("schedule", [DIRECT, star(3, root=1), crossed()])
def test_every_rank_knows_that_its_memory_is_written(schedule: Schedule) -> None:
    """Also a rank that reduces nothing must know it, to protect its memory after a failure."""
    for plan in written_back(schedule):
        assert any(record.flags & Flag.WRITES_BACK for record in plan.records)


def test_nobody_copies_the_results() -> None:
    for plan in written_back(DIRECT):
        assert not any(record.code is Code.COPY for record in plan.records)
        assert plan.addresses_only
        others = [rank for rank in range(RANKS) if rank != plan.rank]
        assert sorted(reader.rank for reader in plan.readers) == others
        assert len({reader.slot for reader in plan.readers}) == len(others)


def test_plans_are_wrong_for_separate_input_and_output() -> None:
    with pytest.raises(ScheduleError, match="is not the output of an in-place call"):
        check_plans(DIRECT.collective, written_back(DIRECT))


# ---- mutations

Edit = Callable[[list[Record]], list[Record]]


def without(code: Code, nth: int = 0) -> Edit:
    def edit(records: list[Record]) -> list[Record]:
        at = [i for i, record in enumerate(records) if record.code is code][nth]
        return records[:at] + records[at + 1 :]

    return edit


def unflagged(code: Code) -> Edit:
    def edit(records: list[Record]) -> list[Record]:
        return [
            replace(r, flags=r.flags & ~Flag.WRITES_BACK) if r.code is code else r for r in records
        ]

    return edit


def sharing_other_memory(records: list[Record]) -> list[Record]:
    """Shares the wrong part in the first slot."""
    at = next(i for i, record in enumerate(records) if record.code is Code.SHARE)
    records[at] = replace(records[at], src=replace(records[at].src, part=1))
    return records


def reading_late(records: list[Record]) -> list[Record]:
    """Reads the rank's own contribution after its post, while a peer may write the result."""
    at = next(i for i, record in enumerate(records) if record.code is Code.SHARE)
    share = records[at]
    copy = Record(
        code=Code.COPY, dst=Ref(space=Space.TMP, rank=1), src=share.src, length=share.length
    )
    post = next(i for i, record in enumerate(records) if record.code is Code.POST)
    return [*records[: post + 1], copy, *records[post + 1 :]]


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (without(Code.WAIT), "may be read before it is written"),
        (without(Code.WAIT, -1), "may be read before rank . writes it|the output is wrong"),
        (without(Code.SHARE), "may be read before it is written"),
        (unflagged(Code.REDUCE), "the output is wrong"),
        (unflagged(Code.SHARE), "not the output of an in-place call that only this rank reads"),
        (sharing_other_memory, "operands of several chunks|not the output|output is wrong"),
        (reading_late, "while its owner reads it|is empty"),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_broken_plan_is_rejected(edit: Edit, text: str, depth: int) -> None:
    plans = written_back(DIRECT)
    records = tuple(edit(list(plans[1].records)))
    plans[1] = replace(plans[1], records=records, num_tmp=1)
    with pytest.raises(ScheduleError, match=text):
        check_plans(DIRECT.collective, plans, depth=depth, in_place=True)


def test_a_second_reader_is_rejected() -> None:
    plans = written_back(DIRECT)
    first = plans[0].readers[0]
    more = first._replace(rank=3 - first.rank)
    plans[0] = replace(plans[0], readers=tuple(sorted({*plans[0].readers, more})))
    with pytest.raises(ScheduleError, match="only this rank reads and may write"):
        check_plans(DIRECT.collective, plans, in_place=True)

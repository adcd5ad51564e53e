from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plain_lowering import plain_lower
from unisono.algorithms import build, names
from unisono.errors import ScheduleError, UnsupportedError
from unisono.schedule import (
    Builder,
    Code,
    Collective,
    ExecutionPlan,
    Flag,
    Reader,
    Record,
    Ref,
    Schedule,
    Space,
    Transfer,
    check,
    chunk_moves,
    lower,
    lower_rank,
)
from unisono.types import Op


def codes(plan: ExecutionPlan) -> str:
    return " ".join(record.code.name for record in plan.records)


def refs(plan: ExecutionPlan, name: str) -> list[tuple[Space, int, int]]:
    found = [getattr(r, name) for r in plan.records if r.code in (Code.COPY, Code.REDUCE, Code.ARG)]
    return [(ref.space, ref.rank, ref.index) for ref in found]


def test_one_shot_stages_once_and_folds_in_rank_order() -> None:
    plan = lower(build("all_reduce", "one_shot", ranks=3))[1]
    assert codes(plan) == "COPY POST WAIT WAIT REDUCE ARG ARG ARG POST"
    reduce = next(r for r in plan.records if r.code is Code.REDUCE)
    assert reduce.nsrc == 3
    assert reduce.flags == Flag.FINAL
    assert reduce.dst.space is Space.OUT
    args = [r.src for r in plan.records if r.code is Code.ARG]
    assert [a.space for a in args] == [Space.SLOT, Space.IN, Space.SLOT]
    assert [a.rank for a in args] == [0, 1, 2]
    assert (plan.num_slots, plan.num_tmp, plan.stages, plan.reduce_depth) == (1, 0, 2, 1)


def test_direct_writes_the_sum_to_output_and_slot_in_one_record() -> None:
    plan = lower(build("all_reduce", "direct", ranks=2))[0]
    assert codes(plan) == "COPY POST WAIT REDUCE ARG ARG POST WAIT COPY POST"
    reduce = plan.records[3]
    assert reduce.flags == Flag.HAS_DST2 | Flag.FINAL
    assert (reduce.dst.space, reduce.dst2.space) == (Space.OUT, Space.SLOT)


def test_receivers_share_one_slot() -> None:
    root, *others = lower(build("broadcast", "direct", ranks=5))
    assert root.num_slots == 1
    for plan in others:
        assert codes(plan) == "WAIT COPY POST"
        assert plan.records[1].src == Ref(space=Space.SLOT, rank=0, index=0)


def test_a_relay_stores_forwarded_values_only_in_its_slot() -> None:
    plan = lower(reduce_chain())[1]
    reduce = next(r for r in plan.records if r.code is Code.REDUCE)
    assert reduce.dst.space is Space.SLOT
    assert reduce.flags == Flag.NONE
    assert (plan.num_slots, plan.num_tmp) == (1, 0)


def reduce_chain() -> Schedule:
    b = Builder(Collective(op=Op.REDUCE, ranks=3, root=2), "chain")
    b.reduce(0, 0, 1)
    b.next_round()
    b.reduce(1, 0, 2)
    return b.build()


def test_an_unwanted_partial_sum_that_is_read_again_is_in_private_memory() -> None:
    schedule = build("reduce", "binomial_tree", ranks=8)
    plan = lower(schedule)[4]  # rank 4 reduces twice, then sends
    first, second = (r for r in plan.records if r.code is Code.REDUCE)
    assert first.dst.space is Space.TMP
    assert second.dst.space is Space.SLOT
    assert plan.num_tmp == 1


def test_inputs_are_staged_in_the_round_of_their_first_send() -> None:
    plan = lower(build("all_to_all", "pairwise", ranks=3))[0]
    assert codes(plan) == "COPY POST WAIT COPY COPY POST WAIT COPY COPY POST"
    assert refs(plan, "src")[0] == (Space.IN, 0, 1)
    assert refs(plan, "src")[2] == (Space.IN, 0, 2)


def test_waits_are_not_repeated() -> None:
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=2, parts=3), "test")
    b.copy(0, 0, 1, count=3)
    b.copy(1, 3, 0, count=3)
    for plan in lower(b.build()):
        assert sum(r.code is Code.WAIT for r in plan.records) == 1


def test_dead_writes_are_dropped() -> None:
    b = Builder(Collective(op=Op.BROADCAST, ranks=3, root=0), "test", scratch=1)
    b.copy(0, 0, 1, 1)  # writes scratch that no rank reads
    b.copy(0, 0, 2, 0)
    b.next_round()
    b.copy(2, 0, 1, 0)
    schedule = b.build()
    check(schedule)
    assert codes(lower(schedule)[1]) == "WAIT COPY POST"


def test_scratch_and_local_moves_are_lowered() -> None:
    b = Builder(Collective(op=Op.ALL_REDUCE, ranks=2), "test", scratch=1)
    for rank in range(2):
        b.copy(1 - rank, 0, rank, 1)
    b.next_round()
    for rank in range(2):
        b.reduce(rank, 1, rank, 0)
    schedule = b.build()
    check(schedule)
    plan = lower(schedule)[1]
    assert codes(plan) == "COPY POST WAIT COPY REDUCE ARG ARG POST"
    assert plan.num_tmp == 1
    # The reduction follows the order of the sending ranks. Both operands come from rank 1.
    assert [r.src.space for r in plan.records if r.code is Code.ARG] == [Space.IN, Space.TMP]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_plan_ends_in_the_same_post(ranks: int) -> None:
    plans = lower(build("broadcast", "scatter_all_gather", ranks=ranks))
    stages = {plan.stages for plan in plans}
    assert len(stages) == 1
    for plan in plans:
        last = Record(code=Code.POST, value=stages.copy().pop(), round=plan.rounds - 1)
        assert plan.records[-1] == last


def test_lengths_refer_to_pieces_of_the_own_rank() -> None:
    for name in ("direct", "binomial_tree"):
        schedule = build("gather", name, ranks=5, root=1)
        for plan in lower(schedule):
            for record in plan.records:
                if record.code in (Code.COPY, Code.REDUCE):
                    assert record.length.rank == plan.rank
                    owner = record.length.index if record.length.space is Space.OUT else plan.rank
                    assert record.length.space is Space.IN or plan.rank == 1
                    assert 0 <= owner < 5


def test_only_relays_of_unknown_pieces_need_equal_lengths() -> None:
    assert any(plan.uniform for plan in lower(build("gather", "binomial_tree", ranks=4)))
    assert any(plan.uniform for plan in lower(build("scatter", "binomial_tree", ranks=4)))
    for op, name in (("gather", "direct"), ("all_gather", "ring"), ("reduce_scatter", "ring")):
        assert not any(plan.uniform for plan in lower(build(op, name, ranks=4)))


def test_only_an_output_over_an_unsent_input_forbids_in_place() -> None:
    assert all(plan.in_place for plan in lower(build("all_to_all", "direct", ranks=4)))
    for ranks in (3, 4, 7):
        assert not any(
            plan.in_place for plan in lower(build("all_to_all", "pairwise", ranks=ranks))
        )
    assert all(plan.in_place for plan in lower(build("all_reduce", "ring", ranks=4)))


def test_reduce_depth_counts_nested_reductions() -> None:
    depths = {
        name: lower(build("all_reduce", name, ranks=8))[3].reduce_depth
        for name in ("one_shot", "direct", "recursive_doubling", "ring")
    }
    assert depths == {"one_shot": 1, "direct": 1, "recursive_doubling": 3, "ring": 7}
    assert lower(build("all_gather", "ring", ranks=4))[0].reduce_depth == 0


def detoured(data: st.DataObject, schedule: Schedule) -> Schedule:
    """Returns the schedule with some transfers through scratch of random ranks, and some unused
    copies.

    Each round becomes two rounds, of which the first writes only scratch.
    """
    ranks, scratch = schedule.collective.ranks, schedule.num_locations
    transfers: list[Transfer] = []
    for t in schedule.transfers:
        later = replace(t, round=2 * t.round + 1)
        what = data.draw(st.sampled_from(["keep", "keep", "detour", "waste"]))
        if what != "keep":
            mid = data.draw(st.integers(0, ranks - 1))
            first_hop = replace(later, round=2 * t.round, dst=mid, dst_chunk=scratch, reduce=False)
            transfers.append(first_hop)
            if what == "detour":
                later = replace(later, src=mid, src_chunk=scratch)
            scratch += t.count
        transfers.append(later)
    transfers.sort(key=lambda t: t.round)
    return replace(schedule, transfers=transfers, scratch=scratch - schedule.collective.num_chunks)


@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_plans_equal_a_plain_lowering(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(list(Op)))
    ranks = data.draw(st.integers(1, 12))
    name, root = data.draw(st.sampled_from(names(op))), data.draw(st.integers(0, ranks - 1))
    schedule = build(op, name, ranks=ranks, root=root)
    if data.draw(st.booleans()) and len(schedule.transfers) < 200:
        schedule = detoured(data, schedule)
    assert lower(schedule) == plain_lower(schedule)


def test_sparse_places_give_the_same_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = [build(op, name, ranks=5, root=1) for op in Op for name in names(op)]
    plans = [lower(schedule) for schedule in schedules]
    monkeypatch.setattr(chunk_moves, "_MOST_DENSE", 0)
    assert [lower(schedule) for schedule in schedules] == plans


def test_too_many_slots_are_rejected() -> None:
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=2, parts=1 << 16), "test")
    rank = np.arange(2)
    b.copy(rank, rank << 16, 1 - rank, count=1 << 16)
    lower_rank(b.build(), 0)
    b = Builder(Collective(op=Op.SCATTER, ranks=3, parts=1 << 15, root=0), "test")
    b.copy(0, 1 << 15, 1, count=1 << 15)
    b.copy(0, 1 << 16, 2, count=1 << 15)
    lower_rank(b.build(), 0)
    b = Builder(Collective(op=Op.SCATTER, ranks=3, parts=(1 << 15) + 1, root=0), "test")
    rank = np.arange(1, 3)
    b.copy(0, rank * ((1 << 15) + 1), rank, count=(1 << 15) + 1)
    with pytest.raises(UnsupportedError, match="a rank needs 65538 slots"):
        lower_rank(b.build(), 0)


def test_256_ranks_are_lowered() -> None:
    for name in ("ring", "direct"):
        schedule = build("all_reduce", name, ranks=256)
        plan = lower_rank(schedule, 100).plan
        assert len(plan.readers) == 510


@pytest.mark.parametrize("op", list(Op))
def test_lower_rank_equals_lower(op: Op) -> None:
    for name in names(op):
        for ranks in (1, 2, 5, 6):
            schedule = build(op, name, ranks=ranks, root=ranks // 2)
            plans = lower(schedule)
            for rank in range(ranks):
                alone = lower_rank(schedule, rank)
                assert alone.plan == plans[rank]
                assert alone.slots == tuple(plan.num_slots for plan in plans)
                assert alone.uniform is any(plan.uniform for plan in plans)
                assert alone.in_place is all(plan.in_place for plan in plans)


def test_a_wrong_schedule_is_not_lowered() -> None:
    b = Builder(Collective(op=Op.BROADCAST, ranks=2, root=0), "test")
    with pytest.raises(ScheduleError, match="rank 1, chunk 0"):
        lower(b.build())


def readings(plan: ExecutionPlan) -> dict[int, dict[int, int]]:
    """Returns, by rank and index of a slot, how many posts of that rank the plan awaits before its
    first read of the slot.
    """
    seen: dict[int, int] = {}
    found: dict[int, dict[int, int]] = {}
    for record in plan.records:
        if record.code is Code.WAIT:
            seen[record.peer] = record.value
        elif record.code in (Code.COPY, Code.ARG):
            src = record.src
            if src.space is Space.SLOT and src.rank != plan.rank:
                found.setdefault(src.rank, {}).setdefault(src.index, seen[src.rank])
    return found


@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_readers_match_the_reads_of_the_plans(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(list(Op)))
    ranks = data.draw(st.integers(1, 12))
    name, root = data.draw(st.sampled_from(names(op))), data.draw(st.integers(0, ranks - 1))
    plans = lower(build(op, name, ranks=ranks, root=root))
    read = [readings(plan) for plan in plans]
    for plan in plans:
        assert list(plan.readers) == sorted(set(plan.readers))
        posts = {(reader.slot, reader.rank): reader.post for reader in plan.readers}
        assert len(posts) == len(plan.readers)
        waited = {
            (slot, reader): post
            for reader in range(ranks)
            for slot, post in read[reader].get(plan.rank, {}).items()
        }
        assert posts.keys() == waited.keys()
        assert all(post <= waited[key] for key, post in posts.items())
        assert all(post == first_post_of(plan, slot) for (slot, _), post in posts.items())


def first_post_of(plan: ExecutionPlan, slot: int) -> int:
    """Returns the number of the first post after the slot was written."""
    own = Ref(space=Space.SLOT, rank=plan.rank, index=slot)
    written = next(i for i, r in enumerate(plan.records) if own in (r.dst, r.dst2))
    return next(r.value for r in plan.records[written:] if r.code is Code.POST)


def test_readers_are_packed_for_the_executor() -> None:
    root, reader, *_ = lower(build("broadcast", "direct", ranks=3))
    assert root.readers == (Reader(post=1, slot=0, rank=1), Reader(post=1, slot=0, rank=2))
    assert root.pack_readers() == bytes([1, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 2, 0])
    assert reader.pack_readers() == b""

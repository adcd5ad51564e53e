from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.algorithms import build, names
from unisono.errors import ScheduleError
from unisono.schedule import Collective, Schedule, Transfer
from unisono.show.holdings import holdings
from unisono.types import Op

EVERY = [(op, name) for op in Op for name in names(op)]


@pytest.mark.parametrize(("op", "name"), EVERY)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_after_the_last_round_every_rank_holds_the_result(
    op: Op, name: str, data: st.DataObject
) -> None:
    ranks = data.draw(st.integers(1, 12))
    schedule = build(op, name, ranks=ranks, root=data.draw(st.integers(0, ranks - 1)))
    replayed = holdings(schedule)
    end = replayed.after(len(replayed.rounds))
    for rank in range(ranks):
        for chunk, contributors in schedule.collective.expected(rank).items():
            held = end[rank, chunk]
            assert held.chunk == chunk
            assert {r for r in range(ranks) if held.mask >> r & 1} == contributors


@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_ring_adds_one_contribution_per_round(n: int) -> None:
    replayed = holdings(build("all_reduce", "ring", ranks=n))
    for k in range(n):
        state = replayed.after(k)
        for rank in range(n):
            chunk = (rank - 1 - k) % n  # the chunk that arrived in round k - 1, the latest
            behind = {(rank - i) % n for i in range(k + 1)}
            assert {r for r in range(n) if state[rank, chunk].mask >> r & 1} == behind


def test_transfers_of_a_round_read_the_state_before_it() -> None:
    collective = Collective(op=Op.ALL_REDUCE, ranks=2)
    swap = tuple(
        Transfer(round=0, src=src, src_chunk=0, dst=1 - src, dst_chunk=0) for src in (0, 1)
    )
    after = holdings(Schedule(collective=collective, algorithm="swap", transfers=swap)).after(1)
    assert (after[0, 0].mask, after[1, 0].mask) == (0b10, 0b01)


@pytest.mark.parametrize("wrong", [{"dst": 2}, {"src_chunk": 1}, {"count": 2}])
def test_a_transfer_of_missing_chunks_or_ranks_is_refused(wrong: dict[str, int]) -> None:
    fields = {"round": 3, "src": 0, "src_chunk": 0, "dst": 1, "dst_chunk": 0} | wrong
    schedule = Schedule(
        collective=Collective(op=Op.BROADCAST, ranks=2, root=0),
        algorithm="wrong",
        transfers=(Transfer(**fields),),
    )
    with pytest.raises(ScheduleError, match=r"round 3: .* rank"):
        holdings(schedule)

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

from unisono.algorithms import build
from unisono.schedule import Builder, Collective
from unisono.types import Op


def test_builder_counts_rounds_and_keeps_their_order() -> None:
    b = Builder(Collective(op=Op.ALL_REDUCE, ranks=3), "test", scratch=1)
    b.reduce(0, 0, 1)
    b.next_round()
    b.copy(1, 0, 2, 1, channel=4)
    b.round = 0
    b.reduce(2, 0, 1)
    schedule = b.build()
    assert [(t.round, t.src, t.reduce) for t in schedule.transfers] == [
        (0, 0, True),
        (0, 2, True),
        (1, 1, False),
    ]
    assert schedule.transfers[2].channel == 4
    assert schedule.num_rounds == 2
    assert schedule.num_locations == 2
    assert [(number, len(transfers)) for number, transfers in schedule.rounds()] == [(0, 2), (1, 1)]


def test_local_moves_are_not_counted_as_sent() -> None:
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=2, parts=2), "test", scratch=2)
    b.copy(0, 0, 0, 4, count=2)
    b.copy(0, 0, 1, count=2)
    schedule = b.build()
    assert (schedule.chunks_sent(0), schedule.chunks_received(0)) == (2, 0)
    assert (schedule.chunks_sent(1), schedule.chunks_received(1)) == (0, 2)


def test_schedules_are_equal_by_value() -> None:
    def make() -> Builder:
        b = Builder(Collective(op=Op.ALL_REDUCE, ranks=2), "test")
        b.reduce(0, 0, 1)
        return b

    assert make().build() == make().build()
    assert hash(make().build()) == hash(make().build())


def test_schedules_can_be_copied_changed_and_pickled() -> None:
    schedule = build("all_reduce", "ring", ranks=5)
    assert pickle.loads(pickle.dumps(schedule)) == schedule == copy.deepcopy(schedule)
    fewer = replace(schedule, transfers=tuple(schedule.transfers)[1:])
    assert fewer.transfers == schedule.transfers[1:]
    assert fewer != schedule


def test_chunk_counts_by_rank_equal_the_count_of_each_rank() -> None:
    for op, name in (("gather", "binomial_tree"), ("all_reduce", "recursive_doubling")):
        schedule = build(op, name, ranks=7, root=2)
        for rank in range(7):
            assert schedule.chunks_sent_by_rank()[rank] == schedule.chunks_sent(rank)
            assert schedule.chunks_received_by_rank()[rank] == schedule.chunks_received(rank)


def test_columns_return_the_slice_of_each_round() -> None:
    schedule = build("broadcast", "binomial_tree", ranks=5)
    assert list(schedule.columns.rounds()) == [
        (0, slice(0, 1)), (1, slice(1, 2)), (2, slice(2, 4)),
    ]  # fmt: skip
    assert list(build("barrier", "direct", ranks=5).columns.rounds()) == []

"""Schedules that the caller passes: they are proved, run, and compared between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranks import Threads
from unisono import Communicator, algorithms
from unisono.errors import MismatchError, ScheduleError, UnsupportedError
from unisono.schedule import Builder, Collective, Schedule, from_msccl_xml, to_msccl_xml
from unisono.types import Op

World = Callable[[int], Threads]


def all_reduce(comm: Communicator, schedule: Schedule, count: int = 1000) -> Any:
    x = np.arange(count) + comm.rank
    return comm.all_reduce(x, algorithm=schedule)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", algorithms.names("all_reduce"))
def test_a_schedule_from_a_file_runs(threads: World, name: str, ranks: int) -> None:
    try:
        built = algorithms.build("all_reduce", name, ranks=ranks)
    except UnsupportedError:
        return
    schedule = from_msccl_xml(to_msccl_xml(built))
    for _ in range(3):  # the second call takes the fast path
        results = threads(ranks).run(all_reduce, schedule)
        expected = sum(np.arange(1000) + r for r in range(ranks))
        assert all((result == expected).all() for result in results)


def test_every_operation_takes_a_schedule(threads: World) -> None:
    def body(comm: Communicator) -> list[Any]:
        def given(op: str) -> Schedule:
            return algorithms.build(op, "direct", ranks=comm.size, root=1)

        x, n = np.full(6, comm.rank + 1), comm.size
        return [
            comm.reduce(x.copy(), 1, algorithm=given("reduce")),
            comm.broadcast(x.copy(), 1, algorithm=given("broadcast")),
            comm.all_gather(x, algorithm=given("all_gather")),
            comm.reduce_scatter(np.tile(x, n), algorithm=given("reduce_scatter")),
            comm.all_to_all(np.repeat(x[:1], n), algorithm=given("all_to_all")),
            comm.gather(x, root=1, algorithm=given("gather")),
            comm.scatter(np.arange(6), np.empty(2, int), root=1, algorithm=given("scatter")),
        ]

    outcomes = threads(3).run(body)
    reduced, sent, gathered, scattered, swapped, _, share = outcomes[0]
    assert (outcomes[1][0] == 6).all()
    assert (reduced == 1).all()
    assert (sent == 2).all()
    assert gathered.tolist() == [1] * 6 + [2] * 6 + [3] * 6
    assert (scattered == 6).all()
    assert swapped.tolist() == [1, 2, 3]
    assert share.tolist() == [0, 1]
    assert outcomes[1][5].tolist() == gathered.tolist()


def test_equal_schedules_match() -> None:
    def body(comm: Communicator) -> Any:
        return all_reduce(comm, algorithms.build("all_reduce", "ring", ranks=comm.size))

    # each rank passes a separate schedule object, and a new one in each call
    with Threads(2) as world:
        for _ in range(2):
            assert (world.run(body)[0] == 2 * np.arange(1000) + 1).all()


def test_different_schedules_of_one_name_are_a_mismatch() -> None:
    def schedule(first: int) -> Schedule:
        b = Builder(Collective(op=Op.ALL_REDUCE, ranks=2), "mine")
        b.reduce(1 - first, 0, first)
        b.next_round()
        b.copy(first, 0, 1 - first)
        return b.build()

    with Threads(2) as world:
        outcomes = world.outcomes(lambda comm: all_reduce(comm, schedule(comm.rank)))
    assert all(isinstance(outcome, MismatchError) for outcome in outcomes), outcomes


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (algorithms.build("all_reduce", "ring", ranks=3), "on 3 ranks; this is all_reduce on 2"),
        (algorithms.build("all_gather", "direct", ranks=2), "a schedule of all_gather"),
    ],
)
def test_a_schedule_for_another_call_is_refused(
    threads: World, schedule: Schedule, words: str
) -> None:
    def body(comm: Communicator) -> str:
        with pytest.raises(UnsupportedError) as caught:
            all_reduce(comm, schedule)
        return str(caught.value)

    assert words in threads(2).run(body)[0]


def test_another_root_is_refused(threads: World) -> None:
    schedule = algorithms.build("broadcast", "direct", ranks=2, root=1)

    def body(comm: Communicator) -> str:
        with pytest.raises(UnsupportedError) as caught:
            comm.broadcast(np.zeros(3), 0, algorithm=schedule)
        return str(caught.value)

    assert (
        "2 ranks with root 1; this is broadcast on 2 ranks with root 0" in threads(2).run(body)[0]
    )


def test_a_wrong_schedule_never_runs(threads: World) -> None:
    b = Builder(Collective(op=Op.ALL_REDUCE, ranks=2), "wrong")
    b.copy(0, 0, 1)

    def body(comm: Communicator) -> str:
        with pytest.raises(ScheduleError) as caught:
            all_reduce(comm, b.build())
        return str(caught.value)

    assert "lacks the contribution" in threads(2).run(body)[0]

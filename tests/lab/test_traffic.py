"""The messages of the fault scenarios succeed without a fault, and fail after a fault."""

from __future__ import annotations

from lab.bodies import add_up
from lab.traffic import LARGE, SMALL, Traffic
from ranks import Threads
from unisono import Communicator


def test_every_message_arrives_without_a_fault() -> None:
    def body(comm: Communicator) -> None:
        traffic = Traffic(comm)
        for count in (1, 10_000, 1):
            traffic.step(lambda count=count: add_up(comm, count))
        traffic.complete()

    with Threads(3) as ranks:
        ranks.run(body)


def test_wrong_data_is_detected_by_the_receiver() -> None:
    def body(comm: Communicator) -> None:
        traffic = Traffic(comm, blocking=False)
        if comm.rank == 1:
            data = traffic._data
            traffic._data = lambda source, count, step: data(source, count, step + 1)  # type: ignore[method-assign]
        traffic.step(lambda: add_up(comm, 1))

    with Threads(3) as ranks:
        found = ranks.outcomes(body)
    assert [type(outcome) for outcome in found] == [type(None), AssertionError, AssertionError]


def test_every_receive_fails_after_a_failure() -> None:
    traffic: dict[int, Traffic] = {}

    def start(comm: Communicator) -> None:
        traffic[comm.rank] = Traffic(comm)
        comm.barrier()

    def end(comm: Communicator) -> list[tuple[bool, str | None]]:
        if comm.rank == 2:
            comm.abort("rank 2 has had enough")
        return [(o.sends, o.error) for o in traffic[comm.rank].outcomes()]

    with Threads(3) as ranks:
        ranks.run(start)
        for outcomes in ranks.outcomes(end):
            receives = [error for sends, error in outcomes if not sends]
            # messages from both other ranks, small and large, and a small message from any rank
            assert receives == ["AbortedError"] * (2 * len((SMALL, LARGE)) + 1)
            assert sum(sends for sends, _ in outcomes) == 4

"""Tests of queries between connection managers, without the control server: which ranks have left,
and what is the most recent call of each rank.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from connection_managers import (
    wait_until,
    world,
)
from ranks import no_descriptors
from unisono.rank_connections.control_messages import CALLED_BYTES, ControlMessage, MessageKind
from unisono.rank_connections.group_endpoint import OVERDUE_EVENT
from unisono.transport.introduction import tag_of

GROUP = b"a group"


@pytest.mark.parametrize("end", ["leave", "close"])
def test_a_query_without_the_server_finds_departures(end: str) -> None:
    with world(3) as ranks:
        asking, _ = (ranks[rank].enter(GROUP, [1, 2]) for rank in (1, 2))
        ranks[0].manager.close()
        if end == "leave":
            ranks[2].manager.leave(GROUP)
        else:
            ranks[2].manager.close()
        time.sleep(0.05)
        asking.raise_events(OVERDUE_EVENT)
        wait_until(lambda: asking.left == {1})
        assert asking.failure() is None


def test_many_queries_without_the_server_are_answered() -> None:
    query = ControlMessage(
        kind=MessageKind.LAST_CALL_QUERY,
        origin=1,
        tag=tag_of(GROUP),
        to=(2,),
        body=bytes(CALLED_BYTES),
    )
    with world(3) as ranks:
        asking, asked = (ranks[rank].enter(GROUP, [1, 2]) for rank in (1, 2))
        ranks[0].manager.close()
        send = ranks[1].manager._world_connections.peer_messages.send_message
        # in total as many queries as a rank sends while it waits for some minutes
        for _ in range(30):
            answers = asked.queries
            ranks[1].manager._loop.run(lambda: [send(query) for _ in range(10)], 5)
            wait_until(lambda answers=answers: asked.queries > answers)
        asked.last_call = b"a call"
        asking.raise_events(OVERDUE_EVENT)
        wait_until(lambda: asking.calls == {1: b"a call"})


def test_many_queries_to_a_late_rank_are_answered() -> None:
    query = ControlMessage(
        kind=MessageKind.LAST_CALL_QUERY,
        origin=1,
        tag=tag_of(GROUP),
        to=(2,),
        body=bytes(CALLED_BYTES),
    )
    with world(3) as ranks:
        asking = ranks[1].enter(GROUP, [1, 2])
        ranks[0].manager.close()
        send, loops = (
            ranks[1].manager._world_connections.peer_messages.send_message,
            [p.manager._loop for p in ranks[1:]],
        )
        for _ in range(150):  # as many queries as a rank sends while it waits for a minute
            loops[0].run(lambda: send(query), 5)
            for loop in loops:
                loop.run(lambda: None, 5)
        ranks[2].enter(GROUP, [1, 2])
        ranks[2].manager.leave(GROUP)
        asking.raise_events(OVERDUE_EVENT)
        wait_until(lambda: asking.left == {1})


def test_a_query_without_the_server_of_its_control_group_finds_departures() -> None:
    """Tests that a query finds departures after the server of the control group has ended. The
    world's server continues, but does not serve this group.
    """
    with world(4) as ranks:
        with ThreadPoolExecutor(3) as pool:
            for member in ranks[1:]:
                pool.submit(
                    member.manager.form_control_group,
                    b"a control group",
                    [1, 2, 3],
                    b"",
                    10,
                    lambda: None,
                )
        asking, _ = (
            ranks[rank].enter(GROUP, [2, 3], control_group=b"a control group") for rank in (2, 3)
        )
        ranks[1].manager.close()
        ranks[3].manager.leave(GROUP)
        asking.raise_events(OVERDUE_EVENT)
        wait_until(lambda: asking.left == {1})
        assert asking.failure() is None


def test_a_rank_without_descriptors_queries_later() -> None:
    with world(3) as ranks:
        asking, asked = (ranks[rank].enter(GROUP, [1, 2]) for rank in (1, 2))
        asked.last_call = b"a call"
        ranks[0].manager.close()
        with no_descriptors():
            asking.raise_events(OVERDUE_EVENT)
            wait_until(lambda: asking.queries)
            # the event loop dials in one iteration and detects the failure in the next
            for _ in range(2):
                ranks[1].manager._loop.run(lambda: None, 5)
        wait_until(lambda: asking.calls == {1: b"a call"})
        assert not asking.left and asking.failure() is None


def test_a_query_returns_the_last_calls_of_all() -> None:
    with world(4) as ranks:
        ends = [member.enter(GROUP, range(4)) for member in ranks]
        for rank, end in enumerate(ends):
            end.last_call = f"call {rank}".encode()
        for asker in (0, 2):
            # Repeats the query while it waits, as the native core does: a peer may enter the group
            # meanwhile.
            def asked(asker: int = asker) -> bool:
                ends[asker].raise_events(OVERDUE_EVENT)
                return len(ends[asker].calls) == 3

            wait_until(asked)
            assert ends[asker].calls == {r: f"call {r}".encode() for r in range(4) if r != asker}
        ends[1].last_call = b"another"
        ends[2].raise_events(OVERDUE_EVENT)
        wait_until(lambda: ends[2].calls[1] == b"another")


def test_queries_reach_a_rank_at_most_four_times_a_second() -> None:
    with world(3) as ranks:
        ends = [member.enter(GROUP, range(3)) for member in ranks]
        begun = time.monotonic()
        while time.monotonic() - begun < 1.2:
            ends[1].raise_events(OVERDUE_EVENT)
            ends[2].raise_events(OVERDUE_EVENT)
            time.sleep(0.005)
        assert 2 <= ends[0].queries <= 1 + (time.monotonic() - begun) / 0.25

"""Tests of connection managers when ranks are invalid, missing or lost."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from connection_managers import (
    SECRET,
    WORLD,
    make_manager,
    peer_infos_of,
    wait_until,
    world,
)
from time_limits import PATIENCE_S, limit_s
from unisono.errors import AuthenticationError, RendezvousError
from unisono.rank_connections.connection_manager import ConnectionManager
from unisono.rank_connections.group_endpoint import OVERDUE_EVENT, Fault

GROUP = b"a group"


@pytest.mark.parametrize("wrong", [{"secret": b"another"}, {"world": b"another"}])
def test_a_wrong_secret_or_world_is_named_at_once(wrong: dict[str, bytes]) -> None:
    leader, stranger, right = managers = [make_manager() for _ in range(3)]
    peer_infos = peer_infos_of([leader, right])

    def join(manager: ConnectionManager, rank: int, **changes: bytes) -> None:
        job = {"world": WORLD, "secret": SECRET, **changes}
        manager.join(rank=rank, peer_infos=peer_infos, timeout_s=PATIENCE_S, **job)

    with ThreadPoolExecutor(2) as pool:
        leading = pool.submit(join, leader, 0)
        with pytest.raises(AuthenticationError, match="same job secret"):
            join(stranger, 1, **wrong)
        assert not leading.done()  # rank 0 waits for the right rank 1
        join(right, 1)
        leading.result()
        list(pool.map(ConnectionManager.close, managers))


def test_a_missing_rank_is_named() -> None:
    managers = [make_manager(), make_manager()]
    with pytest.raises(
        RendezvousError, match=r" timeout after .* s: ranks \[1\] of 2 had not connected"
    ):
        managers[0].join(
            world=WORLD, secret=SECRET, rank=0, peer_infos=peer_infos_of(managers), timeout_s=0.3
        )
    managers[1].close()


def test_a_missing_rank_0_is_named() -> None:
    managers = [make_manager(), make_manager()]
    peer_infos = peer_infos_of(managers)
    managers[0].close()
    with pytest.raises(
        RendezvousError, match=r"rank 1 cannot .* rank 0 at 127.0.0.1:\d+: .*refused"
    ):
        managers[1].join(world=WORLD, secret=SECRET, rank=1, peer_infos=peer_infos, timeout_s=5)


def test_a_silent_rank_0_is_named() -> None:
    managers = [make_manager(), make_manager()]
    begun = time.monotonic()
    with pytest.raises(RendezvousError, match="rank 0"):
        managers[1].join(
            world=WORLD, secret=SECRET, rank=1, peer_infos=peer_infos_of(managers), timeout_s=0.5
        )
    assert time.monotonic() - begun < limit_s(1)
    managers[0].close()


def test_a_peer_that_cannot_be_reached_is_named() -> None:
    with world(3) as ranks:
        ends = [member.enter(GROUP, range(3)) for member in ranks]
        for listener in ranks[1].manager._listeners:
            ranks[1].manager._loop.run(lambda one=listener: (
                ranks[1].manager._loop.unwatch(one), one.close()), 1)  # fmt: skip
        ranks[2].manager.reach(GROUP, [1], 0)
        wait_until(lambda: all(end.failure() for end in ends))
        for end in ends:
            assert end.failure() is not None
            fault, text = end.failure() or (0, "")
            assert fault == Fault.PEER_LOST
            assert "rank 1 at 127.0.0.1:" in text and "refused" in text


def test_a_lost_rank_fails_groups_entered_later() -> None:
    with world(3) as ranks:
        # Closes the connection, as the end of the process does.
        ranks[2].manager._loop.run(ranks[2].manager._world_connections._world_group.close, 1)
        time.sleep(0.05)
        ends = [ranks[rank].enter(GROUP, range(3)) for rank in range(2)]
        wait_until(lambda: all(end.failure() for end in ends))
        for end in ends:
            fault, text = end.failure() or (0, "")
            assert (fault, text) == (1, f"rank 2 (host 127.0.0.1, pid {os.getpid()}) is gone")
        unharmed = [ranks[rank].enter(b"without it", range(2)) for rank in range(2)]
        time.sleep(0.05)
        assert [end.failure() for end in unharmed] == [None, None]


@pytest.mark.parametrize("how", ["leaves", "is lost"])
def test_groups_exchange_messages_without_rank_0(how: str) -> None:
    with world(4) as ranks:
        members = [3, 1, 2]
        ends = {rank: ranks[rank].enter(GROUP, members) for rank in members}
        ends[2].last_call, ends[3].last_call = b"of rank 2", b"of rank 3"
        if how == "leaves":
            ranks[0].manager.close()
        else:
            ranks[0].manager._loop.run(ranks[0].manager._world_connections._world_group.close, 1)
        star = ranks[3].manager._world_connections._world_group._endpoint
        wait_until(star.ended)
        ends[3].raise_events(OVERDUE_EVENT)
        wait_until(lambda: ends[3].calls.get(2) == b"of rank 2")
        assert ends[2].calls[0] == b"of rank 3"
        ends[1].fail_here(Fault.ABORTED, "enough")
        wait_until(lambda: all(end.failure() == (Fault.ABORTED, "enough") for end in ends.values()))


def test_a_failure_that_the_server_did_not_forward_is_sent_again() -> None:
    with world(3) as ranks:
        ends = {rank: ranks[rank].enter(GROUP, [1, 2]) for rank in (1, 2)}
        manager = ranks[0].manager
        channel = manager._world_connections._world_group._endpoint._channels[1]
        manager._loop.run(lambda: manager._loop.unwatch(channel._sock), 1)
        ends[1].fail_here(Fault.ABORTED, "enough")
        time.sleep(0.1)
        assert ends[2].failure() is None
        ranks[0].manager.close()
        wait_until(lambda: ends[2].failure() == (Fault.ABORTED, "enough"))


def test_the_loss_of_a_rank_that_left_a_group_is_no_failure() -> None:
    with world(3) as ranks:
        ends = [member.enter(GROUP, range(3)) for member in ranks]
        ranks[2].manager.leave(GROUP)
        wait_until(lambda: ends[0].left and ends[1].left)
        ranks[2].manager._loop.run(ranks[2].manager._world_connections._world_group.close, 1)
        time.sleep(0.1)
        assert ends[0].failure() is None and ends[1].failure() is None

"""File descriptors and memory of groups: an error reports a shortage, and `close` frees both."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest

from bootstrap_stores import free_port
from connection_managers import wait_until
from group_resources import mappings, open_files
from ranks import Me, Processes, Threads
from unisono import Communicator, RendezvousError, native
from unisono.bootstrap.group_config import JoinedGroup
from unisono.bootstrap.group_network import GroupNetwork, Network
from unisono.errors import AbortedError, CommunicationError

LIMIT = 48


@contextlib.contextmanager
def no_more_than(free: int) -> Iterator[None]:
    """Limits the number of files that the process can still open."""
    held = [os.dup(0)]
    with contextlib.suppress(OSError):
        while True:
            held.append(os.dup(0))
    for fd in held[len(held) - free :]:
        os.close(fd)
    try:
        yield
    finally:
        for fd in held[: len(held) - free]:
            os.close(fd)


def many_groups(me: Me) -> None:
    comm = me.join()
    before = mappings(), open_files()
    groups: list[Any] = []
    with pytest.raises(RendezvousError) as caught:
        while True:
            groups.append(comm.group([0, 1]))
    me.say("full", text=str(caught.value), groups=len(groups))
    for group in groups[:10]:
        group.close()
    comm.barrier()
    for lacking in range(2):
        with (
            no_more_than(3 if me.rank == lacking else LIMIT),
            pytest.raises(RendezvousError) as why,
        ):
            comm.group([0, 1])
        me.say(f"rank {lacking} lacks", text=str(why.value))
    comm.barrier()
    for group in groups:
        group.close()
    left = mappings() - before[0], open_files() - before[1]
    with comm.group([0, 1]) as again:
        total = again.all_reduce(np.ones(2)).tolist()
    me.say("closed", left=left, total=total, whole=comm.all_reduce(np.ones(1)).tolist())
    with pytest.raises(AbortedError, match="this communicator is closed"):
        groups[0].barrier()


def test_a_shortage_of_descriptors_is_reported_and_close_frees_them() -> None:
    with Processes(many_groups, 2, place=lambda rank: {"descriptors": LIMIT}) as ranks:
        for rank, said in enumerate(ranks.wait_for("full", [0, 1])):
            # More than LIMIT / 2 groups fit into LIMIT descriptors, so each group keeps fewer than
            # two descriptors open.
            assert said["groups"] > LIMIT / 2, (rank, said)
            for part in ("rank 0 of 2", "EMFILE", "needs 3", f"ulimit -n, now {LIMIT}", "close"):
                assert part in said["text"]
        for lacking in range(2):
            for said in ranks.wait_for(f"rank {lacking} lacks", [0, 1]):
                assert f"rank {lacking} of 2 has too few descriptors" in said["text"]
                assert "can open 3 more" in said["text"]
        for said in ranks.wait_for("closed", [0, 1]):
            assert said["left"] == [0, 0]
            assert (said["total"], said["whole"]) == ([2.0, 2.0], [2.0])
        assert ranks.exit_codes() == [0, 0]


def groups_over_hosts(me: Me) -> None:
    comm = me.join()
    before = mappings()
    groups = [comm.group([0, 1]) for _ in range(3)]
    during = mappings()
    totals = [group.all_reduce(np.ones(2)).tolist() for group in groups]
    for group in groups:
        group.close()
    me.say("closed", grew=during - before, left=mappings() - before, totals=totals)


def test_groups_of_several_hosts_give_back_their_memory() -> None:
    name = f"tcp://127.0.0.1:{free_port()}"

    def environment(rank: int) -> dict[str, str]:
        return {"UNISONO_HOST_ID": f"host {rank}", "UNISONO_INTERFACE": "=lo"}

    with Processes(groups_over_hosts, 2, name=name, environment=environment) as ranks:
        for said in ranks.wait_for("closed", [0, 1]):
            assert (said["grew"], said["left"]) == (3, 0)
            assert said["totals"] == [[2.0, 2.0]] * 3


class VotingNetwork:
    """A simulated network in which another host requests a vote just while a rank leaves. The vote
    is that of the rank's host, on the group that replaces a failed group.
    """

    def __init__(self, group: native.Group) -> None:
        self._group = group

    def leave(self, name: bytes) -> None:
        assert self._group.exchange_successor(0, 5) == 0


def test_a_vote_stays_in_shared_memory_until_a_rank_leaves_the_network() -> None:
    with Threads(2) as ranks:
        here, there = (comm._group for comm in ranks.comms)
        network = GroupNetwork(cast(Network, VotingNetwork(here)), b"", 0, (0, 1), ((0, 1),))
        JoinedGroup(group=here, nonce=b"", rank0_data=b"", network=network).close()
        assert there.exchange_successor(0, 0) == 5
        with pytest.raises(AbortedError, match="this communicator is closed"):
            here.exchange_successor(5, 6)
        assert there.exchange_successor(5, 7) == 5


def blocked(comm: Communicator) -> Callable[[], object]:
    return [
        lambda: comm.all_reduce(np.ones(1000)),
        lambda: comm.recv(np.ones(3), src=1 - comm.rank),
        lambda: comm.barrier(async_op=True).wait(),
    ][comm.rank]


def test_a_group_is_closed_while_a_thread_waits_in_it() -> None:
    before = mappings()
    with Threads(3) as ranks:
        works = [comm.recv(np.ones(2), src=0, async_op=True) for comm in ranks.comms[1:]]
        waiting = [
            pool.submit(blocked(comm)) for pool, comm in zip(ranks._pools, ranks.comms, strict=True)
        ]
        for comm in ranks.comms:
            comm.close()
        errors = [future.exception(30) for future in waiting]
        assert all(isinstance(error, CommunicationError) for error in errors)
        # A thread that leaves its call last frees the memory, perhaps after its error was raised.
        # Memory of earlier tests may be freed meanwhile.
        wait_until(lambda: mappings() <= before)
        # Calls on the closed communicators raise errors and do not crash.
        for comm in ranks.comms:
            comm.abort("too late")
            for call in (comm.barrier, lambda c=comm: c.send(np.ones(1), 0), comm.shrink):
                with pytest.raises(AbortedError, match="this communicator is closed"):
                    call()
        for work in works:
            with pytest.raises(CommunicationError):
                work.wait()

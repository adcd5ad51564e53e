"""Polls of messages whose peer has left the group, and of operations that have not begun."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranks import Threads
from unisono import Communicator, Work
from unisono.errors import CollectiveTimeoutError, PeerLostError, UnisonoError

GONE, STAYS = 1, 2


def _plain(comm: Communicator, source: int) -> Any:
    return comm.recv(np.zeros(4), source, async_op=True)


def _by_a_copy(comm: Communicator, source: int) -> Any:
    return comm.recv(np.zeros((4, 2))[:, 0], source, async_op=True)


def _both_ways(comm: Communicator, source: int) -> Any:
    return comm.sendrecv(np.ones(4), source, np.zeros(4), source, async_op=True)


def _batched(comm: Communicator, source: int) -> Any:
    with comm.batch(async_op=True):
        handle = comm.recv(np.zeros(4), source, async_op=True)
    return handle


def _batch(comm: Communicator, source: int) -> Any:
    with comm.batch(async_op=True) as batch:
        comm.recv(np.zeros(4), source, async_op=True)
    return batch


KINDS = (_plain, _by_a_copy, _both_ways, _batched, _batch)


def check_at_rank_0(check: Callable[[Communicator], None]) -> None:
    """Runs `check` on rank 0 after rank 1 has left; the group must be alive at the end."""

    def body(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == GONE:
            comm.close()
            return
        if comm.rank == 0:
            comm.recv(np.zeros(0), STAYS, tag=9)
            check(comm)
            comm.send(np.zeros(0), STAYS, tag=9)
        else:
            while _anything_from(comm):
                time.sleep(1e-3)
            comm.send(np.zeros(0), 0, tag=9)
            comm.recv(np.zeros(0), 0, tag=9)

    with Threads(3, timeout_s=20) as world:
        assert world.outcomes(body) == [None] * 3


def _anything_from(comm: Communicator) -> bool:
    """Returns True if a receive from rank 1 stays pending, because rank 1 is still in the group."""
    work = comm.recv(np.zeros(0), GONE, tag=7, async_op=True)
    ended: bool = work.test()
    if not ended:
        assert work.cancel()
    return not ended


def test_wait_any_fails_if_no_work_can_end() -> None:
    def check(comm: Communicator) -> None:
        for kind in KINDS:
            works = [kind(comm, GONE), _by_a_copy(comm, GONE)]
            error = works[Work.wait_any(works)].exception()
            assert isinstance(error, PeerLostError), (kind, error)
            assert works[1].test()

    check_at_rank_0(check)


@pytest.mark.parametrize("kind", KINDS)
def test_wait_any_waits_for_the_work_that_can_end(kind: Callable[[Communicator, int], Any]) -> None:
    def check(comm: Communicator) -> None:
        lost, x = kind(comm, GONE), np.zeros((1, 2))
        loop = comm.recv(x[:, 0], 0, tag=5, async_op=True)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                Work.wait_any([lost, loop], 0.03)
            assert "pending" in repr(lost)
        comm.send(np.ones(1), 0, tag=5)
        assert Work.wait_any([lost, loop]) == 1
        assert x[0, 0] == 1

    check_at_rank_0(check)


def test_batched_receives_end_with_the_timeout_of_the_group() -> None:
    def body(comm: Communicator) -> Any:
        if comm.rank:
            # does not wait in a call, since this rank's own timeout could expire first
            over.wait(10)
            return None
        works = [_batched(comm, 1), _batched(comm, 1)]
        try:
            return works[Work.wait_any(works, 8)].exception()
        finally:
            over.set()

    over = threading.Event()
    with Threads(2, timeout_s=1.0) as world:
        outcomes = world.outcomes(body)
    assert isinstance(outcomes[0], CollectiveTimeoutError)


def test_a_work_that_has_not_begun_raises_and_ends_no_other() -> None:
    def check(comm: Communicator) -> None:
        never = comm.recv_init(np.zeros(4), GONE)
        assert "not started" in repr(never)
        loop = _by_a_copy(comm, 0)
        for ask in (never.test, never.is_completed, lambda: Work.wait_any([never, loop])):
            with pytest.raises(UnisonoError, match="call its start"):
                ask()
        assert loop.cancel()
        with comm.batch(async_op=True) as batch:
            handle = comm.recv(np.zeros(4), GONE, async_op=True)
            assert not batch.test() and not handle.test()
            for work in (batch, handle):
                with pytest.raises(UnisonoError, match="after"):
                    Work.wait_any([work])

    check_at_rank_0(check)

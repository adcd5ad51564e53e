"""Messages between ranks of one host and of several hosts: the same calls and the same errors."""

from __future__ import annotations

import re
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from connection_managers import wait_until
from pretended_hosts import Body, spanning
from time_limits import with_longer_timeouts
from unisono import Communicator, Work
from unisono.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    MismatchError,
    UnisonoError,
)

HOSTS = [(0, 1), (0, 0, 1), (0, 1, 2)]


def on_hosts(body: Body, hosts: tuple[int, ...], *, timeout_s: float = 40.0) -> list[Any]:
    """Runs `body(comm)` on ranks of these hosts. Returns each rank's result or error.

    `timeout_s` is the timeout of calls, after the ranks have joined.
    """

    def timed(comm: Communicator) -> Any:
        comm.timeout_s = timeout_s
        return body(comm)

    environs = [{"UNISONO_HOST_ID": str(host)} for host in hosts]
    return spanning(timed, environs)


def everything(comm: Communicator) -> str:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (0, 1, 30, 5000, 70_000, 1_000_000):
        x, y = np.full(count, comm.rank), np.zeros(count, int)
        comm.sendrecv(x, right, y, left, tag=count)
        assert (y == left).all()
        works = [comm.recv(y, None, None, async_op=True), comm.send(x, right, 7, async_op=True)]
        Work.wait_all(works)
        assert (works[0].source_rank(), works[0].tag()) == (left, 7)
        request = comm.send_init(x, right, 3)
        for _ in range(3):
            request.start()
            found = comm.probe(left)
            assert (found.source, found.tag, found.nbytes) == (left, 3, x.nbytes)
            assert comm.recv(y, found.source, found.tag) == left
            request.wait()
        comm.barrier()
        assert comm.iprobe() is None
        comm.barrier()
    return "done"


@pytest.mark.parametrize("hosts", HOSTS)
def test_every_call_works_with_any_length(hosts: tuple[int, ...]) -> None:
    assert on_hosts(everything, hosts) == ["done"] * len(hosts)


def out_of_order(comm: Communicator) -> str:
    """Sends many more bytes than the memory for unexpected messages holds; the first receive takes
    the last message.
    """
    if comm.rank == 0:
        works = [
            comm.send(np.full(50_000, number), 1, number, async_op=True) for number in range(40)
        ]
        Work.wait_all(works)
    elif comm.rank == 1:
        y = np.zeros(50_000, int)
        for number in reversed(range(40)):
            comm.recv(y, 0, number)
            assert (y == number).all()
    comm.barrier()
    return "done"


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
def test_a_receive_passes_unexpected_messages(hosts: tuple[int, ...]) -> None:
    assert on_hosts(out_of_order, hosts) == ["done", "done"]


def test_a_deadlock_names_the_ranks_that_wait_for_each_other() -> None:
    def body(comm: Communicator) -> None:
        limit_s, comm.timeout_s = comm.timeout_s, 40.0  # only the messages have a short timeout
        comm.barrier()
        comm.timeout_s = limit_s
        comm.send(np.zeros(1 << 20), (comm.rank + 1) % comm.size)

    known = "; these ranks wait for each other: "
    for hosts in HOSTS:
        for error in with_longer_timeouts(
            lambda timeout_s, hosts=hosts: on_hosts(body, hosts, timeout_s=timeout_s),
            lambda errors: not all(known in str(error) for error in errors),
            first_s=1.5,
        ):
            assert isinstance(error, CollectiveTimeoutError)
            assert re.search(r" timeout after (1\.5|6|24) s on rank ", str(error))
            ring = str(error).split(known)[1]
            for rank in range(len(hosts)):
                assert f"rank {rank} in send to rank {(rank + 1) % len(hosts)}" in ring


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
@pytest.mark.parametrize("counts", [(10, 11), (11, 10), (100_000, 99_999), (1, 100_000)])
def test_a_message_of_wrong_length_fails(hosts: tuple[int, ...], counts: tuple[int, int]) -> None:
    def body(comm: Communicator) -> None:
        x = np.zeros(counts[comm.rank], np.uint8)
        comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)
        comm.barrier()

    told = f"rank 0 sent {counts[0]} bytes .* but rank 1 receives {counts[1]} bytes"
    for error in on_hosts(body, hosts):
        with pytest.raises(MismatchError, match=told):
            raise error


def test_wait_any_returns_the_first_ended_call() -> None:
    def body(comm: Communicator) -> Any:
        if comm.rank == 0:
            comm.recv(np.zeros(1), 1)  # after this message, only rank 1 waits
            comm.send(np.ones(1), 1, tag=5)
            comm.barrier()
            return None
        works = [comm.recv(np.zeros(1), 0, tag, async_op=True) for tag in (4, 5, 6)]
        assert not any(work.test() for work in works)
        with pytest.raises(TimeoutError):
            Work.wait_any(works, 0.01)
        comm.send(np.ones(1), 0)
        first = Work.wait_any(works)
        assert [work.cancel() for work in works] == [True, False, True]
        assert Work.wait_any(works[1:]) == 0
        comm.barrier()
        return first

    for hosts in ((0, 0), (0, 1)):
        assert on_hosts(body, hosts)[1] == 1


def test_wait_any_ends_with_the_timeout_of_the_group() -> None:
    def body(comm: Communicator) -> str:
        works = [comm.recv(np.zeros(1), 1 - comm.rank, tag, async_op=True) for tag in (4, 5)]
        first = Work.wait_any(works)
        assert first in (0, 1)
        return str(works[first].exception())

    for hosts in ((0, 0), (0, 1)):
        texts = on_hosts(body, hosts, timeout_s=1.0)
        assert any("each of 2 messages, the first a recv from rank" in text for text in texts)
        assert all(": timeout after " in text for text in texts)


def test_wait_any_of_messages_and_a_collective() -> None:
    def body(comm: Communicator) -> list[int]:
        x, sums = np.ones(3), np.ones(3)
        if comm.rank == 0:
            total = comm.all_reduce(sums, async_op=True)
            # a receive into a strided array, which uses a copy
            never = comm.recv(x[::2], 1, 9, async_op=True)
            found = [Work.wait_any([never, total])]
            found.append(Work.wait_any([never]))
            assert isinstance(never.exception(), CollectiveTimeoutError)
            return found
        comm.all_reduce(sums)
        with pytest.raises(CommunicationError):
            comm.recv(x, 0)
        return []

    assert on_hosts(body, (0, 0), timeout_s=1.0) == [[1, 0], []]


def test_wait_all_takes_a_generator_of_begun_works() -> None:
    def body(comm: Communicator) -> None:
        x, sums = np.full(2, float(comm.rank)), np.ones(1)
        got = [np.zeros(2) for _ in range(3)]
        begun = [comm.recv(y, 1 - comm.rank, async_op=True) for y in got]
        begun += [comm.send(x, 1 - comm.rank, async_op=True) for _ in got]
        results = Work.wait_all(work for work in (*begun, comm.all_reduce(sums, async_op=True)))
        assert len(results) == 7 and sums == [2.0]
        assert all(y.tolist() == [1 - comm.rank] * 2 for y in got)
        never = comm.recv_init(got[0], 1 - comm.rank)
        for wait in (never.wait, partial(Work.wait_all, [never]), partial(Work.wait_any, [never])):
            with pytest.raises(UnisonoError, match="was not started"):
                wait()
        comm.barrier()

    assert on_hosts(body, (0, 0)) == [None, None]


def test_a_rank_may_leave_after_its_message() -> None:
    x = np.ones(3 << 18)

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            comm.recv(np.empty_like(x), 0)
        comm.close()

    for _ in range(5):
        assert on_hosts(body, (0, 0)) == [None, None]


def test_polling_receives_a_message() -> None:
    def body(comm: Communicator) -> int:
        looks = 0
        if comm.rank == 0:
            time.sleep(0.02)
            comm.send(np.ones(100_000), 1)
        else:
            work = comm.recv(np.zeros(100_000), 0, async_op=True)
            while not work.test():
                looks += 1
            assert work.wait().all()
        comm.barrier()
        return looks

    for hosts in ((0, 0), (0, 1)):
        assert on_hosts(body, hosts)[1] > 0


def test_polling_detects_a_rank_that_left_after_rank_0_left() -> None:
    together = threading.Barrier(4, timeout=10)

    def body(comm: Communicator) -> list[str]:
        texts: list[str] = []

        def look(group: Communicator, source: int) -> None:
            work = group.recv(np.zeros(1), source, async_op=True)
            wait_until(work.test)
            texts.append(str(work.exception()))

        pair = comm.group([1, 2]) if comm.rank in (1, 2) else comm
        three = comm.group([1, 2, 3]) if comm.rank else comm
        comm.barrier()
        if comm.rank == 0:
            comm.close()
        together.wait()
        if comm.rank == 2:
            pair.close()
        together.wait()
        if comm.rank == 1:
            look(pair, 1)
            three.close()
        together.wait()
        if comm.rank == 2:
            look(three, 0)  # opens a connection to rank 0
        together.wait()
        if comm.rank in (2, 3):  # the other ranks of the group can still communicate
            three.sendrecv(np.ones(1), 4 - comm.rank, np.zeros(1), 4 - comm.rank)
        together.wait()
        return texts

    environs = [{"UNISONO_HOST_ID": str(host), "UNISONO_STREAMS": "2"} for host in range(4)]
    assert spanning(body, environs) == [
        [],
        ["rank 1 left the group while rank 0 was receiving from it"],
        ["rank 0 left the group while rank 1 was receiving from it"],
        [],
    ]

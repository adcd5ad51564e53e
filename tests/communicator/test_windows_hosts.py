"""Windows of ranks on several hosts equal a model, and failures are told."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from communicator.shrinking_hosts import joined, over_hosts
from communicator.test_messages_hosts import on_hosts
from communicator.test_windows import drawn_steps
from pretended_hosts import World, check_all
from ranks import Me
from unisono import Communicator
from unisono.errors import CommunicationError


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_accesses_equal_a_model(worlds: list[World], data: st.DataObject) -> None:
    world = data.draw(st.sampled_from(worlds))
    n = len(world.comms)
    counts = [data.draw(st.sampled_from([1, 7, 1000, 40_000, 300_000])) for _ in range(n)]
    rounds = drawn_steps(data, n, counts)
    model = [np.arange(count, dtype=np.float32) + rank for rank, count in enumerate(counts)]
    got: list[list[Any]] = [[] for _ in range(n)]
    for shift, row in enumerate(rounds):
        for rank, (what, at, length) in enumerate(row):
            target = model[(rank + shift) % n]
            if what == "put":
                target[at : at + length] = 1000 * shift + rank
            else:
                got[rank].append(target[at : at + length].copy())

    def body(comm: Communicator) -> None:
        me = comm.rank
        array = comm.empty(counts[me], np.float32)
        array[:] = np.arange(counts[me]) + me
        found = []
        with comm.window(array) as window:
            for shift, row in enumerate(rounds):
                what, at, length = row[me]
                peer = (me + shift) % n
                if what == "put":
                    x = np.full(length, 1000 * shift + me, np.float32)
                    window.put(x, peer, at)
                    x[:] = -1  # the program may change the array at once
                else:
                    found.append(window.get(np.empty(length, np.float32), peer, at))
                window.fence()
                comm.barrier()
        assert array.tolist() == model[me].tolist()
        assert [each.tolist() for each in found] == [each.tolist() for each in got[me]]

    check_all(world, body)


def test_a_signal_follows_its_put(worlds: list[World]) -> None:
    def body(comm: Communicator) -> None:
        n, me = comm.size, comm.rank
        array = comm.empty((n, 5000), np.float64)
        with comm.window(array) as window:
            for number in range(30):
                for peer in range(n):
                    window.put(np.full(5000, number + me, np.float64), peer, me * 5000, signal=True)
                for peer in range(n):
                    window.wait(peer)
                    assert (array[peer] == number + peer).all()
                for peer in range(n):  # each peer may write again
                    window.signal(peer)
                for peer in range(n):
                    window.wait(peer)
            assert [window.signals(peer) for peer in range(n)] == [0] * n

    for world in worlds:
        check_all(world, body)


def test_the_owner_makes_no_call(worlds: list[World]) -> None:
    """Rank 0 writes to all arrays and reads them, while the other ranks make no call."""
    written = threading.Event()

    def body(comm: Communicator) -> None:
        array = comm.empty(1000, np.int32)
        array[:] = 0
        written.clear()
        with comm.window(array) as window:
            if comm.rank == 0:
                for peer in range(comm.size):
                    window.put(np.full(1000, peer + 5, np.int32), peer)
                window.fence()
                for peer in range(comm.size):
                    found = window.get(np.empty(1000, np.int32), peer)
                    assert (found == peer + 5).all()
                written.set()
            assert written.wait(60)
            assert (array == comm.rank + 5).all()

    for world in worlds:
        check_all(world, body)


def test_threads_of_a_rank_share_a_window(worlds: list[World]) -> None:
    def body(comm: Communicator) -> None:
        array = comm.empty((3, 20_000), np.int64)
        peer = (comm.rank + 1) % comm.size
        before = (comm.rank - 1) % comm.size
        with comm.window(array) as window:

            def use(thread: int) -> None:
                for number in range(20):
                    x = np.full(20_000, number * 10 + thread)
                    window.put(x, peer, thread * 20_000)
                    found = window.get(np.empty_like(x), peer, thread * 20_000)
                    failed.extend([] if (found == x).all() else [number])

            failed: list[int] = []
            threads = [threading.Thread(target=use, args=(thread,)) for thread in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not failed
            window.signal(peer)
            window.wait(before)

    for world in worlds:
        check_all(world, body)


def test_wrong_arguments_change_nothing(worlds: list[World]) -> None:
    def body(comm: Communicator) -> None:
        array = comm.empty(8, np.float32)
        array[:] = 1
        away = next(peer for peer in range(comm.size) if peer not in comm.hosts[_host(comm)])
        with comm.window(array) as window:
            with pytest.raises(ValueError, match="outside of the array of rank"):
                window.put(np.ones(4, np.float32), away, 5)
            with pytest.raises(TypeError, match="expected float32"):
                window.put(np.ones(4), away)
            with pytest.raises(ValueError, match="not one of the"):
                window.get(np.ones(4, np.float32), comm.size)
            window.put(np.full(8, 2, np.float32)[::2], away)  # not contiguous
            window.fence()
            comm.barrier()
            target = np.empty((2, 8), np.float32)[:, ::2][0]
            assert (window.get(target, away) == 2).all()

    for world in worlds:
        check_all(world, body)


def _host(comm: Communicator) -> int:
    return next(i for i, ranks in enumerate(comm.hosts) if comm.rank in ranks)


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1)])
def test_a_timeout_names_the_signal(hosts: tuple[int, ...]) -> None:
    def body(comm: Communicator) -> None:
        last = comm.size - 1
        with comm.window(comm.empty(4)) as window:
            if comm.rank == 0:
                window.wait(last, 2)
            elif comm.rank == last:
                window.signal(0)
                window.wait(0)
            else:
                comm.barrier()

    first, *_ = on_hosts(body, hosts, timeout_s=1.0)
    last = len(hosts) - 1
    assert isinstance(first, CommunicationError)
    assert f"signal 2 of rank {last}" in str(first) or "timeout" in str(first), first


ACCESSES: dict[str, Callable[[Any, int, Any], None]] = {
    "put": lambda window, peer, x: window.put(x, peer),
    "get": lambda window, peer, x: window.get(x, peer),
    "wait": lambda window, peer, _: window.wait(peer),
    "fence": lambda window, peer, x: (window.put(x[:1], peer), window.fence()),  # type: ignore[func-returns-value]
}


def uses_a_window(me: Me) -> None:
    """Accesses the window of the last rank again and again, until a failure is told."""
    comm = joined(me)
    comm.timeout_s = 20.0
    what = ACCESSES[sorted(ACCESSES)[me.rank % len(ACCESSES)]]
    array = comm.empty(200_000, np.float32)
    array[:] = comm.rank
    window = comm.window(array)
    last = comm.size - 1
    me.say("open")
    if me.rank == last:
        while True:
            time.sleep(0.001)
    x = np.ones(200_000, np.float32)

    def repeat() -> None:
        while True:
            what(window, last, x)

    me.attempt("told", repeat)
    assert (array == comm.rank).all(), "nobody puts to this array"
    array[:] = 7  # the memory is still there
    me.say("end")


@pytest.mark.parametrize("layout", [(0, 0, 0, 0, 1), (0, 1, 2, 1, 0)])
def test_a_killed_rank_is_told(layout: tuple[int, ...]) -> None:
    last = len(layout) - 1
    with over_hosts(uses_a_window, layout) as ranks:
        ranks.wait_for("open", range(len(layout)))
        time.sleep(0.2)
        killed = ranks.signal(last, signal.SIGKILL)
        for said in ranks.wait_for("told", range(last)):
            assert said["error"] == "PeerLostError", said
            assert f"rank {last}" in said["text"], said
            assert said["at"] - killed < 10
        ranks.wait_for("end", range(last))

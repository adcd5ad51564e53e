"""Asynchronous calls: their order, their handles and their failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranks import Threads
from time_limits import limit_s
from unisono import AbortedError, Communicator, MismatchError, Work

World = Callable[[int], Threads]


def test_every_operation_gives_a_handle(threads: World) -> None:
    def check(comm: Communicator) -> None:
        me, n = comm.rank, comm.size
        x = np.full(4 * n, me + 1)
        works: list[Work] = [
            comm.all_reduce(x.copy(), async_op=True),
            comm.all_gather(x[:2], async_op=True),
            comm.reduce_scatter(x, async_op=True),
            comm.all_to_all(x, async_op=True),
            comm.broadcast(x.copy(), 1, async_op=True),
            comm.reduce(x.copy(), 0, async_op=True),
            comm.gather(x[:1], root=2, async_op=True),
            comm.scatter(x if me == 0 else None, np.zeros(4, x.dtype), async_op=True),
            comm.barrier(async_op=True),
        ]
        results = [work.wait() for work in works]
        assert all(work.is_completed() and work.exception() is None for work in works)
        assert results[0].tolist() == [6] * 12
        assert results[1].tolist() == [1, 1, 2, 2, 3, 3]
        assert results[2].tolist() == [6] * 4
        assert results[3].tolist() == [1] * 4 + [2] * 4 + [3] * 4
        assert results[4].tolist() == [2] * 12
        assert results[5].tolist() == [6 if me == 0 else me + 1] * 12
        assert results[6] is None if me != 2 else results[6].tolist() == [1, 2, 3]
        assert results[7].tolist() == [1] * 4
        assert results[8] is None
        assert [work.result() is result for work, result in zip(works, results, strict=True)]

    threads(3).run(check)


def test_repr_of_a_handle(threads: World) -> None:
    def check(comm: Communicator) -> None:
        comm.all_reduce(np.ones(3))
        if comm.rank == 1:
            seen.wait(20)
            comm.all_reduce(np.ones(3))
            comm.send(np.ones(2), 0, tag=7)
            return
        work = comm.all_reduce(np.ones(3), async_op=True)
        message = comm.recv(np.ones(2), 1, tag=7, async_op=True)
        assert repr(work) == "<Work: all_reduce, pending>"
        assert repr(message) == "<Work: recv from rank 1 (16 bytes, tag 7), pending>"
        seen.set()
        work.wait()
        message.wait()
        assert repr(work) == "<Work: all_reduce, done>"
        assert repr(message) == "<Work: recv from rank 1 (16 bytes, tag 7), done>"

    seen = threading.Event()
    threads(2).run(check)


def test_reprs_of_a_batch_and_of_a_failure() -> None:
    def check(comm: Communicator) -> None:
        with comm.batch(async_op=True) as batch:
            work = comm.all_gather(np.ones(3), async_op=True)
            comm.all_reduce(np.ones(2))
            assert repr(work) == "<Work: all_gather in a batch, not begun>"
            assert repr(batch) == "<Work: batch of 2 calls, not begun>"
        batch.wait()
        assert repr(work) == "<Work: all_gather in a batch, done>"
        assert repr(batch) == "<Work: batch of 2 calls, done>"
        failing = comm.all_reduce(np.ones(3 + comm.rank), async_op=True)
        with pytest.raises(MismatchError):
            failing.wait()
        assert repr(failing).startswith("<Work: all_reduce, failed: MismatchError: the ranks")

    with Threads(2) as world:
        assert world.outcomes(check) == [None, None]


def test_calls_run_in_the_order_of_their_begin(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = np.ones(1000)
        works = []
        for step in range(40):
            works.append(comm.all_reduce(x, async_op=True))
            if step % 7 == 3:
                y = np.full(3, comm.rank)
                # a blocking call, which waits for all earlier calls
                assert comm.all_reduce(y).tolist() == [3] * 3
            if step % 5 == comm.rank:
                time.sleep(0.002)
        works[-1].wait()
        assert all(work.is_completed() for work in works)
        assert (x == 3.0**40).all()
        for work in reversed(works):
            assert work.wait() is x
            assert work.wait() is x

    threads(3).run(check)


def test_a_call_goes_on_after_a_wait_with_a_timeout(threads: World) -> None:
    def check(comm: Communicator) -> None:
        if comm.rank == 0:
            x = np.ones(5)
            work = comm.all_reduce(x, async_op=True)
            receiving = comm.recv(np.zeros(2), 1, async_op=True)
            for handle in (work, receiving):
                started = time.monotonic()
                with pytest.raises(TimeoutError, match=r"still under way: timeout after 0\.1 s"):
                    handle.wait(0.1)
                assert 0.09 < time.monotonic() - started < limit_s(1)
                assert not handle.is_completed()
                assert handle.exception() is None
                for gone_s in (0, -1.0):
                    with pytest.raises(TimeoutError):
                        handle.wait(gone_s)
            go.set()
            assert work.wait(10).tolist() == [2] * 5
            assert receiving.wait(10).tolist() == [3, 3]
            assert receiving.source_rank() == 1
        else:
            go.wait(20)
            comm.all_reduce(np.ones(5))
            comm.send(np.full(2, 3.0), 0)

    go = threading.Event()
    threads(2).run(check)


def test_a_wait_with_a_timeout_uses_little_processor_time(threads: World) -> None:
    def check(comm: Communicator) -> tuple[float, float]:
        comm.barrier()
        if comm.rank:
            measured.wait(20)
            comm.all_reduce(np.ones(1))
            comm.send(np.ones(1), 0)
            return 0.0, 0.0
        used = []
        for handle in (
            comm.all_reduce(np.ones(1), async_op=True),
            comm.recv(np.ones(1), 1, async_op=True),
        ):
            # the minimum, since other programs only add time
            used.append(min(processor_s(handle) for _ in range(4)))
            handles.append(handle)
        measured.set()
        for handle in handles:
            handle.wait()
        return used[0], used[1]

    def processor_s(handle: Work) -> float:
        before = time.thread_time()
        with pytest.raises(TimeoutError):
            handle.wait(0.2)
        return time.thread_time() - before

    handles: list[Work] = []
    measured = threading.Event()
    collective_s, message_s = threads(2).run(check)[0]
    print(f"processor time of 0.2 s of waiting: {collective_s:.3f} s, {message_s:.3f} s")
    assert collective_s < 0.1  # polling would use 0.2 s of processor time
    assert message_s < 0.1


def test_a_handle_has_the_failure(threads: World) -> None:
    def check(comm: Communicator) -> None:
        works = [comm.all_reduce(np.ones(3 + comm.rank), async_op=True)]
        works += [comm.barrier(async_op=True) for _ in range(2) if not works[0].is_completed()]
        for work in works:
            for _ in range(2):
                with pytest.raises(MismatchError, match=r"float64\[3\].*float64\[4\]"):
                    work.wait()
            assert work.is_completed()
            assert isinstance(work.exception(), MismatchError)
        with pytest.raises(MismatchError):
            comm.barrier()

    with Threads(2) as world:
        assert world.outcomes(check) == [None, None]


def test_close_ends_pending_calls() -> None:
    def check(comm: Communicator) -> None:
        if comm.rank == 1:
            left.wait(20)
            comm.close()
            return
        works = [comm.all_reduce(np.ones(3), async_op=True) for _ in range(3)]
        works.append(comm.recv(np.ones(3), 1, async_op=True))
        comm.close()
        left.set()
        for work in works:
            with pytest.raises(AbortedError, match="closed"):
                work.wait()
            assert work.is_completed()
        comm.close()
        with pytest.raises(AbortedError, match="closed"):
            comm.all_reduce(np.ones(3))
        with pytest.raises(AbortedError, match="closed"):
            comm.send(np.ones(3), 1)

    left = threading.Event()
    with Threads(2) as world:
        assert world.outcomes(check) == [None, None]


def test_abort_from_another_thread_ends_a_blocked_call() -> None:
    def check(
        comm: Communicator, call: Callable[[Communicator], Any], aborted: threading.Event
    ) -> None:
        def abort() -> None:
            comm.abort("enough is enough")
            aborted.set()

        if comm.rank == 0:
            threading.Timer(0.2, abort).start()
        if comm.rank < 2:
            with pytest.raises(AbortedError, match="rank 0: enough is enough"):
                call(comm)
        assert aborted.wait(20)
        with pytest.raises(AbortedError, match="enough is enough"):
            comm.barrier()

    calls: list[Callable[[Communicator], Any]] = [
        lambda comm: comm.all_reduce(np.ones(3)),
        lambda comm: comm.recv(np.ones(3), 2),
        lambda comm: comm.barrier(async_op=True).wait(),
        lambda comm: comm.recv(np.ones(3), async_op=True).wait(20),
    ]
    for call in calls:
        with Threads(3) as world:
            assert world.outcomes(check, call, threading.Event()) == [None] * 3


def test_a_block_that_raises_aborts_the_group() -> None:
    def check(comm: Communicator) -> str:
        try:
            with comm:
                if comm.rank == 0:
                    raise KeyError("lost key")
                comm.all_reduce(np.ones(2))
        except (KeyError, AbortedError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    with Threads(3) as world:
        outcomes = world.outcomes(check)
    assert outcomes[0] == "KeyError: 'lost key'"
    assert outcomes[1:] == ["AbortedError: rank 0: KeyError: 'lost key'"] * 2


def test_threads_of_one_rank_may_share_a_communicator(threads: World) -> None:
    def check(comm: Communicator) -> None:
        def messages() -> None:
            for step in range(50):
                comm.send(np.full(1000, step), 1 - comm.rank, tag=5)
                out = np.zeros(1000, np.int64)
                comm.recv(out, 1 - comm.rank, tag=5)
                assert (out == step).all()
            done.append(comm.rank)

        beside = threading.Thread(target=messages)
        beside.start()
        for _ in range(50):
            assert comm.all_reduce(np.ones(100)).tolist() == [2] * 100
        beside.join(30)

    done: list[int] = []
    threads(2).run(check)
    assert sorted(done) == [0, 1]

"""Batches: no order of the calls causes a deadlock, and small reductions are packed into one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ranks import Threads
from unisono import (
    Communicator,
    UnisonoError,
    UnsupportedError,
    algorithms,
    pairs,
    premul_sum,
)

World = Callable[[int], Threads]

RANKS = [1, 2, 3, 4, 5, 8, 13]
BEYOND_THE_MAILBOX = 1_000_000


@pytest.mark.parametrize("async_op", [False, True])
def test_both_ranks_may_send_large_messages_first(async_op: bool, threads: World) -> None:
    def check(comm: Communicator) -> None:
        other = 1 - comm.rank
        x = np.full(BEYOND_THE_MAILBOX, comm.rank)
        out = np.full((3, BEYOND_THE_MAILBOX), -1)
        with comm.batch(async_op=async_op) as batch:
            for tag in (0, 1):
                assert comm.send(x, other, tag) is None
            assert comm.send(x + 10, other, 2) is None
            for tag in (2, 0, 1):
                assert comm.recv(out[tag], other, tag) == other
            assert (out == -1).all()
        batch.wait()
        assert batch.is_completed()
        assert batch.exception() is None
        assert (out == np.array([other, other, other + 10])[:, None]).all()

    threads(2).run(check)


@pytest.mark.parametrize("ranks", RANKS)
def test_all_kinds_of_calls_work_in_one_batch(ranks: int, threads: World) -> None:
    def check(comm: Communicator, async_op: bool) -> None:
        me, n = comm.rank, comm.size
        sums = [np.full(k, me + k) for k in (1, 0, 7, 100)]
        # a strided array, which packing copies first
        halves = np.full((3, 4), me, np.float32)[:, ::2]
        many = np.full(20_000, me)
        got = np.zeros((n, 3), np.int64)
        with comm.batch(async_op=async_op) as batch:
            for dst in range(n):
                comm.send(np.full(3, 100 * me + dst), dst)
            for x in sums[:2]:
                assert comm.all_reduce(x) is x
            gathered = comm.all_gather(np.full(2, me))
            comm.all_reduce(halves, "max")
            largest = comm.all_reduce(np.array([me]), "max", async_op=True)
            for src in reversed(range(n)):
                comm.recv(got[src], src)
            for x in sums[2:]:
                comm.all_reduce(x)
            comm.all_reduce(many)
            uneven = comm.all_to_all_v(np.arange(me * n), [me] * n, async_op=True)
            comm.barrier()
        assert batch.wait() is None
        for k, x in zip((1, 0, 7, 100), sums, strict=True):
            assert (x == n * (n - 1) // 2 + n * k).all()
        assert (halves == n - 1).all()
        assert (many == n * (n - 1) // 2).all()
        assert largest.wait().tolist() == [n - 1]
        assert gathered.tolist() == np.repeat(range(n), 2).tolist()
        assert (got == (100 * np.arange(n) + me)[:, None]).all()
        assert uneven.result().size == n * (n - 1) // 2

    for async_op in (False, True):
        threads(ranks).run(check, async_op)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_packing_changes_no_bit(data: st.DataObject, threads: World) -> None:
    ranks = data.draw(st.integers(1, 4))
    kind = st.tuples(
        st.sampled_from([0, 1, 3, 500, 4096, 8193, 20_000]),
        st.sampled_from(["float32", "float16", "int64", "uint8"]),
        st.sampled_from(["sum", "max", "prod", "avg"]),
        st.sampled_from(["plain", "strided", "later", "direct"]),
    )
    calls = data.draw(st.lists(kind, max_size=12))
    rng = np.random.default_rng(len(calls))
    rows = [(rng.normal(size=(ranks, count)) * 9).astype(dtype) for count, dtype, _, _ in calls]

    def check(comm: Communicator) -> None:
        alone, together = [], []
        for (_, _, op, _), each in zip(calls, rows, strict=True):
            alone.append(comm.all_reduce(each[comm.rank].copy(), op))
        before = comm._group.calls
        with comm.batch():
            for (_, _, op, how), each in zip(calls, rows, strict=True):
                x = each[comm.rank].copy()
                # only odd ranks have strided arrays, but all ranks must pack the same calls
                if how == "strided" and comm.rank % 2:
                    x = np.repeat(x, 2)[::2]
                together.append(x)
                algorithm = "direct" if how == "direct" else None
                comm.all_reduce(x, op, algorithm=algorithm, async_op=how == "later")
        packed = {
            (dtype, op)
            for (count, dtype, op, how), each in zip(calls, rows, strict=True)
            if each[0].nbytes <= 32 << 10 and how != "direct"
        }
        others = sum(
            each[0].nbytes > 32 << 10 or how == "direct"
            for (_, _, _, how), each in zip(calls, rows, strict=True)
        )
        assert comm._group.calls - before == len(packed) + others
        for one, other in zip(alone, together, strict=True):
            assert one.tobytes() == other.tobytes()

    threads(ranks).run(check)


def test_small_reductions_are_packed(threads: World) -> None:
    def check(comm: Communicator) -> None:
        arrays = [np.full(256, comm.rank + k, np.float32) for k in range(64)]
        before = comm._group.calls
        with comm.batch():
            for x in arrays:
                comm.all_reduce(x)
        assert comm._group.calls == before + 1
        assert all((x == 3 + 3 * k).all() for k, x in enumerate(arrays))

    threads(3).run(check)


def compose(a: Any, b: Any) -> Any:
    """A reduction function that is associative, but not commutative."""
    return np.stack([a[0] * b[0], a[1] * b[0] + b[1]])


@pytest.mark.parametrize("async_op", [False, True])
def test_every_kind_of_reduction_works_in_a_batch(async_op: bool, threads: World) -> None:
    own = algorithms.build("all_reduce", "ring", ranks=3)

    def check(comm: Communicator) -> None:
        me = comm.rank
        one, two = np.array([[2, 3], [me, 1]]), np.array([[2, 3], [me, 1]])
        ones = [np.ones(4, dtype) for dtype in ("float32", "float16", "int64")]
        truths = np.array([0, 5, me])
        scanned, below = np.array([me + 1]), np.array([me + 1])
        places = pairs(np.full(2, -me), me)
        rung, largest = np.full(5, me), np.full(5, me)
        with comm.batch(async_op=async_op) as batch:
            assert comm.all_reduce(one, compose) is one
            later = comm.all_reduce(two, compose, async_op=True)
            part = comm.reduce_scatter(np.tile(np.arange(3.0), 3), op=np.add)
            shares = comm.reduce_scatter_v(np.arange(3.0), [2, 0, 1], op=np.add)
            for x, factor in zip(ones, (me, 0.5, [1, 2, 3, 4]), strict=True):
                comm.all_reduce(x, premul_sum(factor))
            comm.all_reduce(truths, "lor")
            comm.scan(scanned)
            comm.exscan(below)
            comm.all_reduce(places, "minloc")
            comm.all_reduce(rung, algorithm=own)
            comm.all_reduce(largest, np.maximum)
            assert all((x == 1).all() for x in ones)  # unchanged until the end of the batch
        batch.wait()
        assert one.tolist() == two.tolist() == later.wait().tolist() == [[8, 27], [4, 13]]
        assert part.tolist() == [0, 3, 6]
        assert shares.tolist() == [[0, 3], [], [6]][me]
        assert [x.tolist() for x in ones] == [[3] * 4, [1.5] * 4, [3, 6, 9, 12]]
        assert truths.tolist() == [0, 1, 1]
        assert (scanned[0], below[0]) == ((me + 1) * (me + 2) // 2, max(me * (me + 1) // 2, 1))
        assert places.tolist() == [(-2, 2)] * 2
        assert rung.tolist() == [3] * 5
        assert largest.tolist() == [2] * 5

    for _ in range(2):  # the second run uses prepared calls
        threads(3).run(check)


def test_a_cancelled_batch_does_not_scale_its_arrays(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x, y = np.ones(3), np.ones(3)
        with pytest.raises(ZeroDivisionError), comm.batch():
            comm.all_reduce(x, premul_sum(3))
            _ = 1 // 0
        with comm.batch():
            with pytest.raises(ValueError, match="broadcast"):
                comm.all_reduce(x, premul_sum([1, 2]))
            comm.all_reduce(y)
        assert (x.tolist(), y.tolist()) == ([1] * 3, [2] * 3)

    threads(2).run(check)


def test_tensors_work_in_a_batch(threads: World) -> None:
    torch = pytest.importorskip("torch")

    def check(comm: Communicator) -> None:
        x, y = torch.full((5,), float(comm.rank)), torch.ones(4, 6).t()
        z = torch.zeros(3)
        with comm.batch():
            comm.all_reduce(x)
            comm.all_reduce(y)
            comm.send(torch.full((3,), float(comm.rank)), 1 - comm.rank)
            comm.recv(z, 1 - comm.rank)
        assert x.tolist() == [1.0] * 5
        assert (y == 2).all()
        assert z.tolist() == [1.0 - comm.rank] * 3

    threads(2).run(check)


def test_a_batch_receives_from_any_rank(threads: World) -> None:
    def check(comm: Communicator) -> None:
        out = np.zeros(1, np.int64)
        if comm.rank:
            comm.send(np.array([comm.rank]), 0, 5)
            return
        with comm.batch():
            with pytest.raises(UnsupportedError, match="needs async_op=True"):
                comm.recv(out, tag=5)
            works = [comm.recv(out, tag=5, async_op=True)]
            with pytest.raises(UnisonoError, match="wait for it after the block"):
                works[0].wait()
            assert not works[0].is_completed()
        assert works[0].wait() is out
        assert works[0].source_rank() == out[0]
        with comm.batch():
            works.append(comm.recv(out, tag=5, async_op=True))
        assert {work.source_rank() for work in works} == {1, 2}

    threads(3).run(check)


def test_neighbor_exchange_works_in_a_batch(threads: World) -> None:
    def check(comm: Communicator) -> None:
        me, n = comm.rank, comm.size
        right, left = (me + 1) % n, (me - 1) % n
        out = np.zeros(4, np.int64)
        with comm.batch():
            found = comm.neighbor_exchange(np.array([me, -me]), [left, right], None, [right, left])
            comm.sendrecv(np.full(4, me), right, out, left, tag=1)
        assert found.tolist() == [right, -left]
        assert (out == left).all()

    threads(4).run(check)


def test_other_threads_are_not_recorded(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x, y = np.ones(4), np.ones(4)
        comm.all_reduce(y.copy())
        with comm.batch():
            comm.all_reduce(x)
            thread = threading.Thread(target=comm.all_reduce, args=(y,))
            thread.start()
            thread.join(20)
            assert y.tolist() == [2] * 4
            assert x.tolist() == [1] * 4
        assert x.tolist() == [2] * 4

    threads(2).run(check)


def test_a_batch_goes_on_after_a_wait_with_a_timeout(threads: World) -> None:
    go = threading.Event()

    def check(comm: Communicator) -> None:
        x, out = np.ones(3), np.zeros(2)
        if comm.rank:
            go.wait(20)
        with comm.batch(async_op=True) as batch:
            work = comm.all_reduce(x, async_op=True)
            comm.sendrecv(np.ones(2), 1 - comm.rank, out, 1 - comm.rank)
        if comm.rank == 0:
            for handle in (batch, work):
                with pytest.raises(TimeoutError, match="still under way"):
                    handle.wait(0.05)
                assert not handle.is_completed()
            go.set()
        batch.wait(20)
        assert work.wait() is x
        assert (x.tolist(), out.tolist()) == ([2] * 3, [1] * 2)

    threads(2).run(check)

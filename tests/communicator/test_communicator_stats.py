"""`stats()` counts each call once, with the bytes of its closed form, on every code path."""

from __future__ import annotations

import dataclasses
import json
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from connection_managers import wait_until
from pretended_hosts import spanning
from ranks import Threads, unique_name
from traffic_matrix import sent_and_received, traffic
from unisono import Communicator, UnsupportedError, algorithms, init, premul_sum
from unisono.communicator import (
    CommunicatorStats,
    FusedAllReduce,
    OperationStats,
    VotedAllReduce,
    begin_unvoted,
    begin_voted,
    call_of,
)
from unisono.types import Op

World = Callable[[int], Threads]
Counts = dict[str, tuple[int, int, int]]

RANKS = [1, 2, 3, 4]
LENGTHS = [0, 1, 7, 12, 1000]
DTYPES = ["float16", "float32", "int8"]
SHARED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def counted(comm: Communicator, call: Callable[[], Any]) -> tuple[Counts, OperationStats]:
    """Returns the increase of the counters by a call: first the counters of operations, without
    those that did not change, then the counters of internal calls.
    """
    before = comm.stats()
    call()
    added = comm.stats() - before
    operations = {
        name: (each.calls, each.bytes_sent, each.bytes_received)
        for name, each in added.operations.items()
        if each.calls or each.bytes_sent or each.bytes_received
    }
    return operations, added.internal


def require(comm: Communicator, call: Callable[[], Any], expected: Counts) -> None:
    found, internal = counted(comm, call)
    assert found == expected
    assert (internal.calls, internal.bytes_sent) == (0, 0)


def expected_of(
    comm: Communicator, op: str, counts: Sequence[int], nbytes: int, root: int = -1, calls: int = 1
) -> Counts:
    """Returns the expected counters of an operation with these counts of elements (see
    `elements_moved`). Each element has `nbytes` bytes.
    """
    sent, received = sent_and_received(traffic(op, counts, comm.size, root), comm.rank)
    return {op: (calls, calls * sent * nbytes, calls * received * nbytes)}


def arguments_of(comm: Communicator, op: str, length: int, dtype: str, root: int) -> list[Any]:
    """Returns the arguments of an operation; a rank's portion of an array has `length` elements."""
    piece, whole = np.zeros(length, dtype), np.zeros(length * comm.size, dtype)
    at_root = comm.rank == root
    return {
        "barrier": [],
        "all_gather": [piece, whole],
        "reduce_scatter": [whole, piece],
        "all_to_all": [whole, whole.copy()],
        "gather": [piece, whole if at_root else None],
        "scatter": [whole if at_root else None, piece],
    }.get(op, [piece]) + ([root] if op in ROOTED else [])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("op", Op)
def test_every_algorithm_counts_the_closed_form(op: Op, ranks: int, threads: World) -> None:
    def body(comm: Communicator) -> int:
        served = 0
        root = (ranks - 1) // 2
        for dtype in DTYPES:
            for length in LENGTHS if op is not Op.BARRIER else [0]:
                arguments = arguments_of(comm, op, length, dtype, root)
                counts = [length] * (comm.size if op in SHARED else 1)
                nbytes = np.dtype(dtype).itemsize
                expected = expected_of(comm, op, counts, nbytes, root if op in ROOTED else -1)
                names = [None, *algorithms.names(op)] if op is not Op.BARRIER else [None]
                for name in names:
                    options = {} if op is Op.BARRIER else {"algorithm": name}
                    try:
                        getattr(comm, op)(*arguments, **options)
                    # all ranks raise if the algorithm does not support this number of ranks
                    except UnsupportedError:
                        continue
                    served += name is not None
                    for _ in range(2):  # the second and third call take the fast path
                        require(
                            comm,
                            lambda a=arguments, o=options: getattr(comm, op)(*a, **o),
                            expected,
                        )
                    work = getattr(comm, op)(*arguments, **options, async_op=True)
                    work.wait()
        return served

    assert min(threads(ranks).run(body)) > 0 or op is Op.BARRIER


@pytest.mark.parametrize("ranks", RANKS)
def test_the_first_call_counts_as_the_later_ones(ranks: int) -> None:
    def body(comm: Communicator) -> None:
        x = np.ones(10, np.float32)
        expected = expected_of(comm, "all_reduce", [10], 4)
        for async_op in (False, True, False):
            require(
                comm,
                lambda a=async_op: (
                    comm.all_reduce(x, async_op=True).wait() if a else comm.all_reduce(x)
                ),
                expected,
            )

    with Threads(ranks) as world:
        world.run(body)


@pytest.mark.parametrize("ranks", RANKS)
def test_uneven_pieces_count_their_own_lengths(ranks: int, threads: World) -> None:
    def body(comm: Communicator) -> None:
        me, n = comm.rank, comm.size
        counts, row = [3 * r + 1 for r in range(n)], 2 * 4  # rows of two float32
        x = np.ones((counts[me], 2), np.float32)
        whole = np.ones((sum(counts), 2), np.float32)
        gathered = expected_of(comm, "all_gather", counts, row)
        require(comm, lambda: comm.all_gather_v(x, counts), gathered)
        shared = expected_of(comm, "reduce_scatter", counts, row)
        require(comm, lambda: comm.reduce_scatter_v(whole, counts), shared)
        root = n - 1
        require(
            comm,
            lambda: comm.gather_v(x, counts, root),
            expected_of(comm, "gather", counts, row, root),
        )
        require(
            comm,
            lambda: comm.scatter_v(whole if me == root else None, counts, root, np.ones_like(x)),
            expected_of(comm, "scatter", counts, row, root),
        )
        table = [[(src + 2 * dst) % 4 for dst in range(n)] for src in range(n)]
        rows = np.ones((sum(table[me]), 2), np.float32)
        exchanged = expected_of(comm, "all_to_all", np.ravel(table).tolist(), row)
        require(comm, lambda: comm.all_to_all_v(rows, table), exchanged)
        # Without the other ranks' counts, an internal call exchanges them.
        for call, expected in (
            (lambda: comm.all_to_all_v(rows, table[me]), exchanged),
            (lambda: comm.all_gather_v(x), gathered),
            (lambda: comm.all_gather_v(x, async_op=True).wait(), gathered),
        ):
            found, internal = counted(comm, call)
            assert found == expected
            assert internal.calls == 1
            assert (internal.bytes_sent > 0) is (n > 1)

    threads(ranks).run(body)


@pytest.mark.parametrize("ranks", RANKS)
def test_reductions_that_copy_count_in_the_callers_type(ranks: int, threads: World) -> None:
    def body(comm: Communicator) -> None:
        n = comm.size
        for dtype in ("float16", "float32"):
            x, nbytes = np.ones(7, dtype), np.dtype(dtype).itemsize
            reduced = expected_of(comm, "all_reduce", [7], nbytes)
            require(comm, lambda x=x: comm.all_reduce(x, premul_sum(0.5)), reduced)
            require(comm, lambda x=x: comm.all_reduce(np.ones(14, x.dtype)[::2]), reduced)
            if n > 1:
                require(comm, lambda x=x: comm.all_reduce(x, algorithm="ring"), reduced)
            for call, expected in (
                (lambda x=x: comm.all_reduce(x, np.maximum), reduced),
                (
                    lambda x=x: comm.reduce(x, 0, np.maximum),
                    expected_of(comm, "reduce", [7], nbytes, 0),
                ),
                (lambda x=x: comm.scan(x, np.maximum), expected_of(comm, "scan", [7], nbytes)),
                (
                    lambda x=x: comm.reduce_scatter(np.tile(x, n), None, np.maximum),
                    expected_of(comm, "reduce_scatter", [7] * n, nbytes),
                ),
            ):
                found, internal = counted(comm, call)
                assert found == expected
                assert internal.calls == 1  # the call that compares the ranks' functions
        counts = list(range(1, n + 1))
        pieces = [np.ones(count) for count in counts]
        found, _ = counted(comm, lambda: comm.reduce_scatter(pieces, None, np.maximum))
        assert found == expected_of(comm, "reduce_scatter", counts, 8)

    threads(ranks).run(body)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_batch_counts_its_calls_one_by_one(ranks: int, threads: World) -> None:
    def batch(comm: Communicator, async_op: bool) -> None:
        me, n = comm.rank, comm.size
        with comm.batch(async_op=async_op) as calls:
            for length in (3, 5, 0, 10_000):
                comm.all_reduce(np.ones(length, np.float32))
                comm.all_reduce(np.ones(length, np.float16))
            comm.all_gather(np.ones(4))
            comm.send(np.ones(6), (me + 1) % n)
            comm.recv(np.ones(6), (me - 1) % n)
        calls.wait()

    def body(comm: Communicator) -> None:
        expected: Counts = {}
        for length in (3, 5, 0, 10_000):
            for nbytes in (4, 2):
                one = expected_of(comm, "all_reduce", [length], nbytes)["all_reduce"]
                so_far = expected.get("all_reduce", (0, 0, 0))
                expected["all_reduce"] = tuple(np.add(so_far, one).tolist())  # type: ignore[assignment]
        expected |= expected_of(comm, "all_gather", [4] * comm.size, 8)
        message = 48 if comm.size > 1 else 0
        expected |= {"send": (1, message, 0), "recv": (1, 0, message)}
        for async_op in (False, True, False):
            require(comm, lambda a=async_op: batch(comm, a), expected)

    threads(ranks).run(body)


@pytest.mark.parametrize("ranks", RANKS)
def test_messages_count_at_sender_and_receiver(ranks: int, threads: World) -> None:
    def body(comm: Communicator) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for length in (0, 1, 100, 100_000):
            x, y = np.ones(length), np.ones(length)
            nbytes = x.nbytes if comm.size > 1 else 0
            expected = {"send": (1, nbytes, 0), "recv": (1, 0, nbytes)}
            require(comm, lambda x=x, y=y: comm.sendrecv(x, right, y, left), expected)
            require(comm, lambda x=x, y=y: comm.sendrecv(x, right, y), expected)

            def asynchronous(x: Any = x, y: Any = y) -> None:
                works = [comm.recv(y, async_op=True), comm.send(x, right, async_op=True)]
                for work in works:
                    work.wait()

            require(comm, asynchronous, expected)
            require(
                comm,
                lambda x=x, y=y: comm.neighbor_exchange([x], [right], [y], [left]),
                expected,
            )
            requests = [comm.recv_init(y, left), comm.send_init(x, right)]

            def persistent(requests: Any = requests) -> None:
                for _ in range(3):
                    for request in requests:
                        request.start()
                    for request in requests:
                        request.wait()

            require(comm, persistent, {k: tuple(3 * v for v in t) for k, t in expected.items()})  # type: ignore[misc]

    threads(ranks).run(body)


def test_a_cancelled_receive_does_not_count(threads: World) -> None:
    def body(comm: Communicator) -> None:
        def cancel() -> None:
            work = comm.recv(np.ones(5), async_op=True)
            assert work.cancel()

        require(comm, cancel, {})

    threads(2).run(body)


def test_a_refused_call_does_not_count() -> None:
    def body(comm: Communicator) -> None:
        def refuse() -> None:
            with pytest.raises(UnsupportedError):
                comm.all_reduce(np.ones(3), "band")

        require(comm, refuse, {})
        require(comm, comm.barrier, {"barrier": (1, 0, 0)})

    with Threads(2) as world:
        world.run(body)


@pytest.mark.parametrize("carries_vote", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_voted_calls_count_only_if_they_ran(ranks: int, carries_vote: bool) -> None:
    def body(comm: Communicator) -> None:
        arrays = tuple(np.ones(length, np.float32) for length in (3, 10))
        fused = FusedAllReduce(comm, arrays, "sum")
        repeated = VotedAllReduce(comm, arrays, "sum", carries_vote=carries_vote)
        each = [expected_of(comm, "all_reduce", [length], 4)["all_reduce"] for length in (3, 10)]
        both: Counts = {"all_reduce": tuple(np.sum(each, axis=0).tolist())}  # type: ignore[dict-item]
        vote = traffic("all_reduce", [1], comm.size)
        # a vote of its own has 8 bytes, and a vote that the data carries is one of their elements
        vote_bytes = (4 if carries_vote else 8) * sent_and_received(vote, comm.rank)[0]

        def voted(ready: bool) -> Callable[[], None]:
            def call() -> None:
                work = repeated.begin(arrays) if ready else repeated.begin_void()
                work.wait()
                assert work.ran is all_ready

            return call

        for all_ready, expected in ((True, both), (True, both), (False, {}), (True, both)):
            found, internal = counted(comm, voted(all_ready or comm.rank > 0))
            assert found == expected
            assert (internal.calls, internal.bytes_sent) == (1, vote_bytes)
        require(comm, lambda: begin_unvoted(comm, "fused", fused.call(arrays)).wait(), both)
        gather = expected_of(comm, "all_gather", [3] * comm.size, 4)
        call = call_of(comm, "all_gather", arrays[:1])
        found, internal = counted(comm, lambda: begin_voted(comm, "gather", call).wait())
        assert (found, internal.calls) == (gather, 1)

    with Threads(ranks) as world:
        world.run(body)


def test_each_communicator_counts_for_itself() -> None:
    def body(comm: Communicator) -> None:
        before = comm.stats()
        part = comm.split(comm.rank % 2)
        pair = comm.group([0, 1])
        split = comm.stats() - before
        assert (split.calls, split.internal.calls) == (0, 1)
        assert part is not None
        part.all_reduce(np.ones(4, np.float32))
        found = part.stats()
        assert (found.calls, found.bytes_sent, found.bytes_received) == (1, 16, 16)
        if pair is not None:
            assert pair.stats().calls == 0
            pair.close()
        part.close()
        assert part.stats() == found
        assert comm.stats().calls == before.calls

    with Threads(4) as world:
        world.run(body)


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1), (0, 1, 2)])
def test_ranks_of_several_hosts_count_the_same_bytes(hosts: tuple[int, ...]) -> None:
    def body(comm: Communicator) -> str:
        n = comm.size
        for length in (0, 7, 1000):
            for op in Op:
                arguments = arguments_of(comm, op, length, "float32", 1)
                counts = [length] * (n if op in SHARED else 1)
                expected = expected_of(comm, op, counts, 4, 1 if op in ROOTED else -1)
                for _ in range(2):
                    require(comm, lambda o=op, a=arguments: getattr(comm, o)(*a), expected)
        right, left = (comm.rank + 1) % n, (comm.rank - 1) % n
        for length in (3, 200_000):
            x, y = np.ones(length), np.ones(length)
            expected = {"send": (1, x.nbytes, 0), "recv": (1, 0, x.nbytes)}
            require(comm, lambda x=x, y=y: comm.sendrecv(x, right, y, left), expected)
        part = comm.split(0)
        assert part is not None
        assert part.stats().calls == 0
        assert part.stats().internal.calls > 0  # the call that agrees on a selection
        part.close()
        return "done"

    environs = [{"UNISONO_HOST_ID": str(host)} for host in hosts]
    assert spanning(body, environs) == ["done"] * len(hosts)


def test_waits_for_a_late_rank_count_as_seconds() -> None:
    waited = threading.Event()

    def body(comm: Communicator) -> CommunicatorStats:
        if comm.rank == 1:
            assert waited.wait(60)
            comm.all_reduce(np.ones(3))
            comm.send(np.ones(3), 0)
            return comm.stats()
        # an asynchronous call first waits in this thread for a short time
        work = comm.all_reduce(np.ones(3), async_op=True)
        message = comm.recv(np.ones(3), 1, async_op=True)
        with pytest.raises(TimeoutError):
            message.wait(0.01)
        wait_until(lambda: comm.stats().operations["all_reduce"].wait_s > 0)
        found = comm.stats()
        assert found.operations["all_reduce"].calls == 0
        assert found.operations["recv"].wait_s > 0
        assert found.operations["broadcast"].wait_s == 0
        waited.set()
        work.wait()
        message.wait()
        return comm.stats()

    with Threads(2) as world:
        first, _ = world.run(body)
    total = sum(each.wait_s for each in first.operations.values()) + first.internal.wait_s
    assert first.wait_s == pytest.approx(total)
    assert total > 0


def test_counts_of_several_threads_are_complete() -> None:
    calls, many = 200, 4

    def body(comm: Communicator) -> None:
        def messages(tag: int) -> None:
            for _ in range(calls):
                comm.sendrecv(np.ones(3), 1 - comm.rank, np.ones(3), 1 - comm.rank, tag)

        pool = [threading.Thread(target=messages, args=(tag,)) for tag in range(many)]
        for thread in pool:
            thread.start()
        for _ in range(calls):
            comm.all_reduce(np.ones(2))
        for thread in pool:
            thread.join()
        found = comm.stats().operations
        assert found["all_reduce"].calls == calls
        assert found["all_reduce"].bytes_sent == 16 * calls
        assert (found["send"].calls, found["recv"].calls) == (many * calls, many * calls)
        assert found["send"].bytes_sent == found["recv"].bytes_received == 24 * many * calls

    with Threads(2) as world:
        world.run(body)


def test_stats_are_values() -> None:
    with init(rank=0, size=1, rendezvous=unique_name()) as comm:
        comm.barrier()
        found = comm.stats()
        assert pickle.loads(pickle.dumps(found)) == found
        assert json.loads(json.dumps(dataclasses.asdict(found)))["operations"]["barrier"]["calls"]
        assert (found + found).calls == 2 * found.calls == 2
        nothing = found - found
        assert nothing.calls == nothing.bytes_sent == nothing.bytes_received == 0
        assert nothing.wait_s == 0
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.internal = OperationStats()  # type: ignore[misc]
    assert set(found.operations) == {*Op, "send", "recv", "put", "get", "signal", "wait"}

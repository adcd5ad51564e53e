"""Messages between two ranks: tags, sources, sizes, order and mismatches."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import numpy as np
import pytest

from ranks import Threads
from unisono import CommunicationError, Communicator, MismatchError, PeerLostError

World = Callable[[int], Threads]


def test_messages_of_any_size_arrive(threads: World) -> None:
    counts = [0, 1, 7, 1000, 8191, 8192, 8193, 16_384, 16_385, 32_768, 65_537, 300_001]

    def check(comm: Communicator) -> None:
        for count in counts:
            if comm.rank == 0:
                comm.send(np.arange(count), 1)
            else:
                out = np.zeros(count, np.int64)
                assert comm.recv(out, 0) == 0
                np.testing.assert_array_equal(out, np.arange(count))

    threads(2).run(check)


def test_tags_are_matched_in_any_order(threads: World) -> None:
    def check(comm: Communicator) -> None:
        tags = [3, 0, 2**40, 1]
        if comm.rank == 0:
            for tag in tags:
                for part in range(2):  # messages with equal tags arrive in the order of their sends
                    comm.send(np.array([tag, part]), 1, tag)
        else:
            out = np.zeros(2, np.int64)
            for tag in sorted(tags):
                for part in range(2):
                    comm.recv(out, 0, tag)
                    assert out.tolist() == [tag, part]

    threads(2).run(check)


def test_a_long_unexpected_message_does_not_block_other_tags(threads: World) -> None:
    def check(comm: Communicator) -> None:
        long = np.arange(200_000)
        if comm.rank == 0:
            work = comm.send(long, 1, 1, async_op=True)
            comm.send(np.zeros(0), 1, 2)
            comm.send(np.array([5]), 1, 3)
            work.wait()
        else:
            small, out = np.zeros(1, np.int64), np.zeros(200_000, np.int64)
            late = comm.recv(out, 0, 1, async_op=True)
            comm.recv(small, 0, 3)
            assert small[0] == 5
            comm.recv(np.zeros(0), 0, 2)
            assert late.wait() is out
            np.testing.assert_array_equal(out, long)
        if comm.rank == 0:
            work = comm.send(long, 1, 1, async_op=True)
            comm.send(long[:1], 1, 3)
            work.wait()
        else:
            comm.recv(small, 0, 3)  # the long message still has no receive
            comm.recv(out, 0, 1)
            np.testing.assert_array_equal(out, long)

    threads(2).run(check)


def test_recv_from_any_source_returns_the_source(threads: World) -> None:
    def check(comm: Communicator) -> None:
        if comm.rank:
            for step in range(3):
                comm.send(np.array([comm.rank, step]), 0, tag=9)
            return
        seen: dict[int, list[int]] = {1: [], 2: [], 3: []}
        out = np.zeros(2, np.int64)
        for _ in range(8):
            source = comm.recv(out, tag=9)
            assert out[0] == source
            seen[source].append(int(out[1]))
        work = comm.recv(out, tag=9, async_op=True)
        assert work.wait() is out
        seen[work.source_rank()].append(int(out[1]))
        assert all(steps == [0, 1, 2] for steps in seen.values())

    threads(4).run(check)


def test_two_ranks_may_send_to_each_other_at_once(threads: World) -> None:
    def check(comm: Communicator, asynchronous: tuple[bool, bool]) -> None:
        peer = 1 - comm.rank
        x, out = np.full(150_000, comm.rank), np.zeros(150_000, np.int64)
        works = [comm.recv(out, peer, async_op=True)] if asynchronous[1] else []
        works += [comm.send(x, peer, async_op=True)] if asynchronous[0] else []
        if not asynchronous[0]:
            comm.send(x, peer)
        if not asynchronous[1]:
            assert comm.recv(out, peer) == peer
        for work in works:
            work.wait()
        assert (out == peer).all()

    for asynchronous in ((True, True), (True, False), (False, True)):
        threads(2).run(check, asynchronous)


def test_all_pairs_exchange_messages_beside_collectives(threads: World) -> None:
    def check(comm: Communicator) -> None:
        peers = [p for p in range(comm.size) if p != comm.rank]
        outs = {p: np.zeros(9000 + p, np.int32) for p in peers}
        works = [comm.recv(outs[p], p, async_op=True) for p in peers]
        x = np.full(9000 + comm.rank, comm.rank, np.int32)
        works += [comm.send(x, p, async_op=True) for p in peers]
        # collectives run at the same time
        assert comm.all_reduce(np.ones(1)).tolist() == [comm.size]
        for work in works:
            work.wait()
        assert all((outs[p] == p).all() for p in peers)

    threads(5).run(check)


def test_many_small_messages_keep_their_order(threads: World) -> None:
    def check(comm: Communicator) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        x = np.zeros(1, np.int64)
        for step in range(200):
            comm.send(np.array([step]), right)
            comm.recv(x, left)
            assert x[0] == step
        outs = [np.zeros(1, np.int64) for _ in range(60)]
        works = [comm.recv(out, left, async_op=True) for out in outs]
        works += [comm.send(np.array([step]), right, async_op=True) for step in range(60)]
        for work in reversed(works):
            work.wait()
        assert [int(out[0]) for out in outs] == list(range(60))

    threads(3).run(check)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("posted_first", [False, True])
@pytest.mark.parametrize(
    ("sent", "received", "text"),
    [
        (np.zeros(3), np.zeros(4), r"24 bytes.*3 elements.*receives 32 bytes"),
        (np.zeros(3), np.zeros(3, np.float32), r"float64.*float32"),
        (np.zeros(2, np.int64), np.zeros(2), r"int64.*float64"),
        (np.zeros(0), np.zeros(1), r"sent 0 bytes.*receives 8 bytes"),
        (np.zeros(100_000), np.zeros(1), r"800000 bytes.*receives 8 bytes"),
    ],
)
def test_a_message_of_wrong_length_fails_on_both_ranks(
    sent: np.ndarray, received: np.ndarray, text: str, posted_first: bool, asynchronous: bool
) -> None:
    posted = threading.Event()

    def check(comm: Communicator) -> None:
        if comm.rank == 0:
            if posted_first:
                posted.wait(10)
            comm.send(sent, 1)
            comm.barrier()
            return
        out = received.copy()
        if not posted_first:
            # rank 2's message gives rank 0's message time to arrive first
            comm.recv(np.zeros(1), 2)
        if not asynchronous:
            threading.Timer(0.1, posted.set).start()
            comm.recv(out, 0)
            return
        work = comm.recv(out, 0, async_op=True)
        posted.set()
        try:
            work.wait()
        finally:
            assert work.is_completed()
            assert isinstance(work.exception(), MismatchError)

    def outsider(comm: Communicator) -> None:
        if comm.rank < 2:
            return check(comm)
        if not posted_first:
            comm.send(np.zeros(1), 1)
        comm.barrier()

    with Threads(3) as world:
        for outcome in world.outcomes(outsider):
            assert isinstance(outcome, MismatchError)
            assert "rank 0 sent" in str(outcome)
            assert "rank 1 receives" in str(outcome)
            assert re.search(text, str(outcome))


def test_wrong_arguments_are_refused(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = np.zeros(1)
        for peer in (-1, 2, 99):
            with pytest.raises(ValueError, match=f"dst {peer} is not one of the 2 ranks"):
                comm.send(x, peer)
            with pytest.raises(ValueError, match=f"src {peer} is not one of the 2 ranks"):
                comm.recv(x, peer)
        for tag in (-1, 2**63):
            with pytest.raises(ValueError, match="tag: expected a number from 0"):
                comm.send(x, 1 - comm.rank, tag=tag)
        comm.barrier()

    threads(2).run(check)


def test_a_call_may_be_repeated_after_a_lack_of_memory(threads: World) -> None:
    def check(comm: Communicator) -> None:
        # a contiguous copy would exceed the memory of any machine
        most = np.broadcast_to(np.float64(1), 1 << 57)
        x, y = np.full(5, comm.rank), np.empty(5, int)
        peer = 1 - comm.rank
        for async_op in (False, True):
            with pytest.raises(MemoryError):
                comm.send(most, peer, async_op=async_op)
        with pytest.raises(MemoryError), comm.batch():
            comm.recv(y, peer)
            comm.send(most, peer)
        comm.sendrecv(x, peer, y, peer)
        assert (y == peer).all()

    threads(2).run(check)


@pytest.mark.parametrize("source", [1, None])
def test_a_receive_from_a_rank_that_left_fails(source: int | None) -> None:
    def check(comm: Communicator) -> None:
        if comm.rank:
            comm.send(np.ones(1), 0)
            comm.close()
            return
        x = np.zeros(1)
        for sender in (1, 2):
            comm.recv(x, sender)  # a message that was sent before the failure is delivered
        with pytest.raises(PeerLostError, match="left the group while rank 0 was receiving"):
            comm.recv(x, source)
        with pytest.raises(CommunicationError):
            comm.send(x, 2)

    with Threads(3, timeout_s=8) as world:
        assert world.outcomes(check) == [None] * 3

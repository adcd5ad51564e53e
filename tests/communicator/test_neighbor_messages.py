"""Messages of a rank to itself, in both directions at once, and between neighbors of any graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ranks import Threads
from unisono import Communicator, MismatchError

World = Callable[[int], Threads]


# ---- messages to oneself, in both directions at once, to any neighbors


@pytest.mark.parametrize("ranks", [1, 2])
def test_messages_to_oneself_are_copies(ranks: int, threads: World) -> None:
    def check(comm: Communicator) -> None:
        me = comm.rank
        for count in (0, 3, 300_001):
            x, out = np.full(count, me + 1), np.zeros(count, np.int64)
            early = comm.send(x, me, tag=4, async_op=True)  # the send begins before its receive
            assert comm.recv(out, me, tag=4) == me
            early.wait()
            assert (out == me + 1).all()
            x[:] = 7
            late = comm.recv(out, None, tag=5, async_op=True)
            assert comm.send(x, me, tag=5, async_op=True).wait() is None
            assert late.wait() is out
            assert late.source_rank() == me
            assert (out == 7).all()
        for step in range(3):
            comm.send(np.array([step]), me)
        out = np.zeros(1, np.int64)
        assert [(comm.recv(out, me), int(out[0]))[1] for _ in range(3)] == [0, 1, 2]

    threads(ranks).run(check)


def test_a_message_of_wrong_length_to_oneself_fails() -> None:
    def check(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(np.zeros(3), 0)
            comm.recv(np.zeros(2), 0)
        else:
            comm.barrier()

    with Threads(2) as world:
        for outcome in world.outcomes(check):
            assert isinstance(outcome, MismatchError)
            assert "rank 0 sent 24 bytes" in str(outcome)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_sendrecv_works_on_a_ring(ranks: int, threads: World) -> None:
    def check(comm: Communicator) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for count in (0, 1, 100_001):
            x, out = np.full(count, comm.rank), np.zeros(count, np.int64)
            assert comm.sendrecv(x, right, out, left) is out
            assert (out == left).all()
            work = comm.sendrecv(out, right, out, left, async_op=True)
            assert work.wait() is out
            assert (out == (left - 1) % comm.size).all()
            strided = np.full((count, 2), comm.rank)[:, 0]
            comm.sendrecv(strided, left, strided, right, tag=3)
            assert (strided == right).all()

    threads(ranks).run(check)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 9])
def test_neighbor_exchange_swaps_halos_on_a_ring(ranks: int, threads: World) -> None:
    """Exchanges halos on rings of all sizes. On rings of one and two ranks, both neighbors are the
    same rank.
    """

    def check(comm: Communicator) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for width in (1, 30_000):
            edges = [np.full(width, 10 * comm.rank), np.full(width, 10 * comm.rank + 1)]
            halo = [np.zeros(width, np.int64), np.zeros(width, np.int64)]
            both = comm.neighbor_exchange(edges, [left, right], halo, [right, left])
            assert both is halo
            # the right neighbor's message to its left neighbor
            assert (halo[0] == 10 * right).all()
            assert (halo[1] == 10 * left + 1).all()

    threads(ranks).run(check)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16])
def test_neighbor_exchange_works_on_any_graph(ranks: int, threads: World) -> None:
    """Tests asymmetric graphs with loops and parallel edges, with a different order on each
    rank.
    """
    rng = np.random.default_rng(ranks)
    edges = [(int(s), int(d)) for s, d in rng.integers(0, ranks, (3 * ranks, 2))]
    lengths = rng.choice([0, 1, 9, 20_000], len(edges))

    def check(comm: Communicator) -> None:
        me = comm.rank
        leaving = [e for e, (s, _) in enumerate(edges) if s == me]
        # Messages of one rank keep their order. Messages of different ranks may arrive in any
        # order.
        coming = sorted((e for e, (_, d) in enumerate(edges) if d == me), key=lambda e: edges[e][0])
        x = [np.full(lengths[e], e) for e in leaving]
        out = [np.full(lengths[e], -1) for e in coming]
        for later in (False, True):
            found = comm.neighbor_exchange(
                x,
                [edges[e][1] for e in leaving],
                out,
                [edges[e][0] for e in coming],
                async_op=later,
            )
            assert (found.wait() if later else found) is out
            assert all((piece == e).all() for e, piece in zip(coming, out, strict=True))
            for piece in out:
                piece[:] = -1

    threads(ranks).run(check)


def test_neighbor_exchange_splits_one_array_and_allocates_results(threads: World) -> None:
    def check(comm: Communicator) -> None:
        me, n = comm.rank, comm.size
        others = [r for r in range(n) if r != me]
        x = np.arange(2 * len(others) * 3).reshape(-1, 3) + 100 * me
        found = comm.neighbor_exchange(x, others)
        assert found.shape == x.shape
        for place, src in enumerate(others):
            # the first of the two rows that src sends to this rank
            share = 2 * (me if me < src else me - 1)
            sent = np.arange(2 * len(others) * 3).reshape(-1, 3)[share : share + 2] + 100 * src
            np.testing.assert_array_equal(found[2 * place : 2 * place + 2], sent)
        listed = comm.neighbor_exchange([np.full(me + r, me) for r in others], others)
        assert [piece.tolist() for piece in listed] == [[r] * (me + r) for r in others]
        assert comm.neighbor_exchange([], []) == []
        np.testing.assert_array_equal(comm.neighbor_exchange(x, others, x), found)
        with pytest.raises(ValueError, match="a multiple of 2 rows, one share per neighbour"):
            comm.neighbor_exchange(np.zeros(3), [0, 1])
        with pytest.raises(ValueError, match="expected 1 arrays, one per neighbour, not 2"):
            comm.neighbor_exchange([x, x], [0])
        with pytest.raises(ValueError, match="a neighbour 4 is not one of the 4 ranks"):
            comm.neighbor_exchange([x], [4])
        with pytest.raises(ValueError, match="needs out"):
            comm.neighbor_exchange([x], [0], sources=[1, 2])
        comm.barrier()

    threads(4).run(check)


def test_neighbours_that_disagree_get_both_lengths() -> None:
    def check(comm: Communicator) -> None:
        other = 1 - comm.rank
        comm.neighbor_exchange([np.zeros(3)], [other], [np.zeros(4 - comm.rank)])
        comm.barrier()

    with Threads(2) as world:
        for outcome in world.outcomes(check):
            assert isinstance(outcome, MismatchError)
            assert "rank 1 sent 24 bytes" in str(outcome)
            assert "rank 0 receives 32 bytes" in str(outcome)

"""Memory layouts of arrays: every layout works. Where needed, the call copies the input and copies
the result back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ranks import Threads
from unisono import Communicator, MismatchError

Array = NDArray[Any]
World = Callable[[int], Threads]

RANKS = 3


def strided(values: Array) -> Array:
    """Returns every second element of a larger array."""
    room = np.full((values.shape[0], values.shape[1] * 2), 99, values.dtype)
    view = room[:, ::2]
    view[...] = values
    return view


def reversed_rows(values: Array) -> Array:
    """Returns rows with negative strides."""
    view = values.copy()[::-1, ::-1]
    view[...] = values
    return view


def transposed(values: Array) -> Array:
    """Returns the values as the transposed view of a contiguous array."""
    return np.ascontiguousarray(values.T).T


def swapped(values: Array) -> Array:
    """Returns an array in the other byte order."""
    return values.astype(values.dtype.newbyteorder(">"))


def unaligned(values: Array) -> Array:
    """Returns an array at an odd address."""
    room = np.zeros(values.nbytes + 1, np.uint8)
    view = room[1:].view(values.dtype).reshape(values.shape)
    view[...] = values
    return view


LAYOUTS: list[Callable[[Array], Array]] = [
    strided, reversed_rows, transposed, np.asfortranarray, swapped, unaligned,
]  # fmt: skip


def rows_of(rank: int, shape: tuple[int, ...] = (6, 5)) -> Array:
    """Returns a rank's contribution: consecutive integers from 100 * `rank`."""
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape) + 100 * rank


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numpy_arrays_of_any_layout_work(layout: Callable[[Array], Array], threads: World) -> None:
    every = [rows_of(rank) for rank in range(RANKS)]

    def check(comm: Communicator) -> None:
        for _ in range(2):  # the second call takes the fast path
            x = layout(rows_of(comm.rank))
            assert comm.all_reduce(x) is x
            np.testing.assert_array_equal(x, sum(every))
            x = layout(rows_of(comm.rank))
            comm.broadcast(x, root=1)
            np.testing.assert_array_equal(x, every[1])
            x = layout(rows_of(comm.rank))
            comm.reduce(x, root=2)
            np.testing.assert_array_equal(x, sum(every) if comm.rank == 2 else every[comm.rank])
            x, out = layout(rows_of(comm.rank)), layout(np.zeros((18, 5), np.int32))
            assert comm.all_gather(x, out) is out
            np.testing.assert_array_equal(out, np.concatenate(every))
            share = layout(np.zeros((2, 5), np.int32))
            comm.reduce_scatter(x, share)
            np.testing.assert_array_equal(share, sum(every)[2 * comm.rank : 2 * comm.rank + 2])
            out = layout(np.zeros((6, 5), np.int32))
            comm.all_to_all(x, out)
            mine = slice(2 * comm.rank, 2 * comm.rank + 2)
            np.testing.assert_array_equal(out, np.concatenate([each[mine] for each in every]))
            work = comm.all_reduce(x, async_op=True)
            np.testing.assert_array_equal(work.wait(), sum(every))
        out = layout(np.zeros((6, 5), np.int32))
        if comm.rank == 0:
            comm.send(layout(rows_of(7)), 1)
        elif comm.rank == 1:
            comm.recv(out, 0)
            np.testing.assert_array_equal(out, rows_of(7))

    threads(RANKS).run(check)


def test_the_gaps_of_a_strided_array_do_not_change(threads: World) -> None:
    def check(comm: Communicator) -> None:
        room = np.zeros(20)
        comm.all_reduce(room[::2])
        room[1::2] = 7
        comm.broadcast(room[1:9:2])
        assert room[::2].tolist() == [0] * 10
        assert room[1::2].tolist() == [7] * 10

    threads(2).run(check)


def test_read_only_arrays_are_inputs_but_not_outputs(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = np.arange(4.0)
        x.flags.writeable = False
        assert comm.all_gather(x).tolist() == [*range(4)] * 2
        assert comm.reduce_scatter(x).tolist() == ([0, 2], [4, 6])[comm.rank]
        for call in (comm.all_reduce, lambda x: comm.all_gather(x[:2], x)):
            with pytest.raises(ValueError, match="read-only"):
                call(x)
        expanded = np.broadcast_to(np.float64(3), 5)
        assert comm.all_gather(expanded).tolist() == [3] * 10
        if comm.rank == 0:
            comm.broadcast(x)
            with pytest.raises(ValueError, match="read-only"):
                comm.recv(x, 1)
        else:
            y = np.zeros(4)
            assert comm.broadcast(y).tolist() == [0, 1, 2, 3]

    threads(2).run(check)


def test_lists_of_uneven_pieces_work(threads: World) -> None:
    counts = [4, 0, 9]

    def check(comm: Communicator) -> None:
        me = comm.rank
        x = np.full(counts[me], me, np.int64)
        out = [np.zeros(count, np.int64) for count in counts]
        assert comm.all_gather(x, out) is out
        assert [piece.tolist() for piece in out] == [[r] * counts[r] for r in range(3)]
        pieces = [np.full(count, 10**r + me) for r, count in enumerate(counts)]
        share = comm.reduce_scatter(pieces)
        assert share.tolist() == [3 * 10**me + 3] * counts[me]
        into = np.zeros((3, counts[me]), np.int64)[1]
        assert comm.reduce_scatter(tuple(pieces), into, "max") is into
        assert into.tolist() == [10**me + 2] * counts[me]

    threads(3).run(check)


def test_uneven_pieces_of_several_blocks(threads: World) -> None:
    counts = [300_001, 3, 0, 140_000]

    def check(comm: Communicator) -> None:
        me, n = comm.rank, comm.size
        out = [np.zeros(count, np.float32) for count in counts]
        comm.all_gather(np.full(counts[me], me + 1, np.float32), out)
        assert all((out[r] == r + 1).all() for r in range(n))
        share = comm.reduce_scatter([np.full(c, r + 1, np.float32) for r, c in enumerate(counts)])
        assert share.size == counts[me]
        assert (share == n * (me + 1)).all()
        # Only ranks 0 and 1 send or receive the long array, but all other ranks must run as many
        # steps as these two.
        length = np.full((n, n), 2)
        length[0, 1] = 300_001
        sent = [np.full(length[me, d], 10 * me + d, np.float32) for d in range(n)]
        got = [np.zeros(length[s, me], np.float32) for s in range(n)]
        assert comm.all_to_all(sent, got) is got
        assert all((got[s] == 10 * s + me).all() for s in range(n))

    threads(4).run(check)


def test_uneven_all_to_all(threads: World) -> None:
    def check(comm: Communicator) -> None:
        me, n = comm.rank, comm.size
        for dtype in (np.int8, np.complex128):
            sent = [np.full(me * n + d, me * n + d, dtype) for d in range(n)]
            got = [np.zeros(s * n + me, dtype) for s in range(n)]
            comm.all_to_all(sent, got)
            assert all((got[s] == s * n + me).all() for s in range(n))
        # In the first call the result is a list of strided arrays, in the second call the input is.
        x = np.arange(2 * n) + 100 * me
        lists = [np.zeros(4, np.int64)[::2] for _ in range(n)]
        comm.all_to_all(x, lists)
        assert [piece.tolist() for piece in lists] == [
            [100 * s + 2 * me, 100 * s + 2 * me + 1] for s in range(n)
        ]
        work = comm.all_to_all(lists, np.zeros(2 * n, np.int64), async_op=True)
        assert work.wait().tolist() == x.tolist()

    threads(5).run(check)


def test_all_to_all_names_ranks_that_disagree(threads: World) -> None:
    def check(comm: Communicator) -> None:
        sent = [np.zeros(3)] * 2
        comm.all_to_all(sent, [np.zeros(3), np.zeros(3 if comm.rank else 4)])

    with Threads(2) as world:
        for outcome in world.outcomes(check):
            assert isinstance(outcome, MismatchError)
            assert str(outcome) == (
                "all_to_all: rank 1 sends 3 elements (24 bytes) of float64 to rank 0, which "
                "receives 4 elements (32 bytes): x[0] of rank 1 and out[1] of rank 0 must be equal"
            )


def test_gather_and_scatter_of_lists(threads: World) -> None:
    def check(comm: Communicator) -> None:
        out = [np.zeros(2) for _ in range(3)]
        found = comm.gather(np.full(2, comm.rank + 0.5), out, root=1)
        if comm.rank == 1:
            assert found is out
            assert [piece.tolist() for piece in out] == [[0.5] * 2, [1.5] * 2, [2.5] * 2]
        x = [np.full(4, r) for r in range(3)] if comm.rank == 2 else None
        share = comm.scatter(x, np.zeros(4, np.int64), root=2)
        assert share.tolist() == [comm.rank] * 4
        assert comm.barrier() is None

    threads(3).run(check)


def test_results_may_overwrite_the_input(threads: World) -> None:
    def check(comm: Communicator, count: int) -> None:
        me, n = comm.rank, comm.size
        whole = np.full(n * count, -1, np.int32)
        mine = whole[me * count : (me + 1) * count]
        mine[:] = me
        comm.all_gather(mine, whole)
        assert (whole.reshape(n, count) == np.arange(n)[:, None]).all()
        comm.reduce_scatter(whole, mine)
        assert (mine == n * me).all()
        others = np.delete(whole.reshape(n, count), me, axis=0)
        assert (others == np.delete(np.arange(n), me)[:, None]).all()
        whole[:] = np.repeat(np.arange(n) + 100 * me, count)
        for _ in range(2):
            comm.all_to_all(whole, whole)
        assert (whole.reshape(n, count) == np.arange(n)[:, None] + 100 * me).all()
        if me == 1:
            comm.gather(mine, whole, root=1)
            assert (whole.reshape(n, count) == 101 * np.arange(n)[:, None]).all()
            comm.scatter(whole, mine, root=1)
        else:
            comm.gather(mine, None, root=1)
            comm.scatter(None, mine, root=1)
        assert (mine == 101 * me).all()

    for count in (1, 100, 70_001):
        threads(4).run(check, count)


def test_every_operation_accepts_length_zero(threads: World) -> None:
    def check(comm: Communicator) -> None:
        for x in (np.zeros(0), np.zeros((0, 4), np.int8), np.zeros((3, 0))):
            assert comm.all_reduce(x) is x
            assert comm.all_gather(x).size == 0
            assert comm.all_to_all(x).shape == x.shape
            assert comm.reduce_scatter(x).size == 0
            assert comm.broadcast(x) is x
        out = [np.zeros(0) for _ in range(3)]
        assert comm.all_to_all(out, [np.zeros(0) for _ in range(3)])
        assert comm.all_gather(np.zeros(0), out) is out

    threads(3).run(check)


def test_calls_of_many_shapes_do_not_mix(threads: World) -> None:
    def check(comm: Communicator) -> None:
        for count in range(300):
            x = np.full(count, comm.rank, (np.int16, np.int64)[count % 2])
            assert (comm.all_reduce(x, ("sum", "max")[count % 3 == 0]) == 1).all()

    threads(2).run(check)


def test_the_fast_path_reads_each_array_anew(threads: World) -> None:
    # The second call with equal arguments reads only the array's fields and skips the other checks.
    def body(comm: Communicator) -> None:
        for length in (6, 6, 4):
            x = np.full(length, comm.rank + 1, np.float32)
            comm.all_reduce(x)
            assert x.tolist() == [6] * length
        x = np.full(6, comm.rank + 1, np.float32)
        x.resize(4, refcheck=False)
        assert comm.all_reduce(x).tolist() == [6] * 4
        x = np.full((6, 2), comm.rank + 1, np.float32)[:, 0]
        assert comm.all_reduce(x).tolist() == [6] * 6
        x = np.full(4, comm.rank + 1, ">f4")
        assert comm.all_reduce(x).tolist() == [6] * 4
        x = np.full(4, comm.rank + 1, np.float64)
        assert comm.all_reduce(x).tolist() == [6] * 4
        x = np.zeros((4, 0), np.float32)
        assert comm.all_reduce(x).shape == (4, 0)
        x = np.ones(4, np.float32)
        x.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            comm.all_reduce(x)

    threads(RANKS).run(body)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_floats_of_any_layout_are_widened(
    layout: Callable[[Array], Array], threads: World
) -> None:
    def check(comm: Communicator) -> None:
        x = layout(np.full((6, 5), 2048 if comm.rank == 0 else 1, np.float16))
        assert comm.all_reduce(x, algorithm="ring") is x
        assert set(x.ravel().tolist()) == {2050}
        pieces = layout(np.full((6, 5), 2048 if comm.rank == 0 else 1, np.float16))
        assert set(comm.reduce_scatter(pieces, algorithm="ring").ravel().tolist()) == {2050}

    threads(RANKS).run(check)

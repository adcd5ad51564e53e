"""Windows: puts, gets and signals equal a model of the arrays, and misuse is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono
from ranks import Threads
from unisono import Communicator, MismatchError, UnsupportedError

World = Callable[[int], Threads]
DTYPES = ("float32", "float64", "int8", "uint16", "complex128", "bool")
COUNTS = (1, 7, 1000, 40_000)


def drawn_steps(data: st.DataObject, ranks: int, counts: list[int]) -> list[tuple[Any, ...]]:
    """Returns rounds of accesses, of which no two in a round meet in an element: in round i, each
    rank accesses the array of the rank i + 1 above it."""
    steps = []
    for shift in range(data.draw(st.integers(1, 4))):
        row = []
        for rank in range(ranks):
            count = counts[(rank + shift) % ranks]
            at = data.draw(st.integers(0, count))
            length = data.draw(st.integers(0, count - at))
            row.append((data.draw(st.sampled_from(["put", "get"])), at, length))
        steps.append(row)
    return steps


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@given(data=st.data())
@settings(max_examples=20)
def test_accesses_equal_a_model(ranks: int, threads: World, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    counts = [data.draw(st.sampled_from(COUNTS)) for _ in range(ranks)]
    steps = drawn_steps(data, ranks, counts)
    strided = data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    start = [(rng.standard_normal(count) * 9).astype(dtype) for count in counts]
    news = [[(rng.standard_normal(max(counts)) * 9).astype(dtype) for _ in start] for _ in steps]
    model = [each.copy() for each in start]
    read: dict[tuple[int, int], Any] = {}
    for number, row in enumerate(steps):
        for rank, (what, at, length) in enumerate(row):
            target = model[(rank + number) % ranks]
            if what == "put":
                target[at : at + length] = news[number][rank][:length]
            else:
                read[number, rank] = target[at : at + length].copy()

    def check(comm: Communicator) -> None:
        array = comm.empty(counts[comm.rank], dtype)
        array[:] = start[comm.rank]
        with comm.window(array) as window:
            for number, row in enumerate(steps):
                what, at, length = row[comm.rank]
                peer = (comm.rank + number) % comm.size
                room = np.zeros((length, 2 if strided else 1), dtype)
                x = room[:, 0]
                if what == "put":
                    x[:] = news[number][comm.rank][:length]
                    window.put(x, peer, at)
                else:
                    assert window.get(x, peer, at) is x
                    assert (x == read[number, comm.rank]).all()
                for other in range(comm.size):
                    window.signal(other)
                for other in range(comm.size):
                    window.wait(other)
        assert array.tobytes() == model[comm.rank].tobytes()

    threads(ranks).run(check)


def test_a_signal_follows_its_put(threads: World) -> None:
    """A stream of numbers through one element, with a signal each way."""

    def check(comm: Communicator) -> None:
        array = comm.empty(1, np.int64)
        array[0] = 0
        with comm.window(array) as window:
            for number in range(1, 500):
                if comm.rank == 0:
                    window.put(np.array([number]), 1, signal=True)
                    window.wait(1)
                else:
                    window.wait(0)
                    assert array[0] == number
                    window.signal(0)

    threads(2).run(check)


def test_counts_of_signals(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with comm.window(comm.empty(4, np.float32)) as window:
            assert window.signals(0) == window.signals(1) == 0
            comm.barrier()
            if comm.rank == 0:
                for _ in range(5):
                    window.signal(1)
                window.wait(1)
                window.signal(0)  # to itself
                window.wait(0)
            else:
                window.wait(0, count=2)
                window.wait(0, 0)
                window.wait(0, count=3)
                assert window.signals(0) == 0
                window.signal(0)

    threads(2).run(check)


def test_tensors_and_parts_of_arrays(threads: World) -> None:
    def check(comm: Communicator) -> None:
        whole = comm.empty((4, 100), np.float32)
        whole[...] = comm.rank
        with comm.window(whole[2]) as window:
            peer = 1 - comm.rank
            window.put(torch.full((10,), 7.0 + comm.rank), peer, 5, signal=True)
            window.wait(peer)
            assert (whole[2, 5:15] == 7.0 + peer).all()
            assert (np.delete(whole[2], range(5, 15)) == comm.rank).all()
            assert (whole[[0, 1, 3]] == comm.rank).all()
            read = window.get(torch.zeros(2, 2), peer, 13)
            assert read.flatten().tolist() == [7.0 + comm.rank] * 2 + [float(peer)] * 2

    threads(2).run(check)


def test_several_windows_on_one_array(threads: World) -> None:
    def check(comm: Communicator) -> None:
        array = comm.empty(8, np.float64)
        array[:] = 0
        with comm.window(array[:4]) as low, comm.window(array[4:]) as high:
            low.put(np.full(4, 1.0), 1 - comm.rank, signal=True)
            high.put(np.full(4, 2.0), 1 - comm.rank, signal=True)
            high.wait(1 - comm.rank)
            low.wait(1 - comm.rank)
        assert array.tolist() == [1.0] * 4 + [2.0] * 4

    threads(2).run(check)


def test_wrong_arguments_change_nothing(threads: World) -> None:
    def check(comm: Communicator) -> None:
        array = comm.empty(10, np.float32)
        array[:] = 3
        x = np.ones(4, np.float32)
        with comm.window(array) as window:
            for error, text, call in (
                (ValueError, "dst 2 is not one of the 2 ranks", lambda: window.put(x, 2)),
                (TypeError, "expected the number of a rank", lambda: window.put(x, "1")),
                (ValueError, "at: expected", lambda: window.put(x, 1, -1)),
                (ValueError, "put: 4 elements from element 7 on are outside of the array of rank "
                 "0, which has 10 elements", lambda: window.put(x, 0, 7)),
                (ValueError, "get: 4 elements from element 1000", lambda: window.get(x, 0, 1000)),
                (TypeError, "put: expected float32, the type of the window's arrays, not float64",
                 lambda: window.put(np.ones(2), 1)),
                (TypeError, "put: expected a NumPy array", lambda: window.put([1.0], 1)),
                (ValueError, "read-only", lambda: window.get(np.broadcast_to(x[:1], 4), 1)),
                (ValueError, "src -1 is not one", lambda: window.wait(-1)),
                (ValueError, "count: expected", lambda: window.wait(0, -1)),
                (ValueError, "dst 5 is not one", lambda: window.signal(5)),
            ):  # fmt: skip
                with pytest.raises(error, match=text):
                    call()
            comm.barrier()
            assert (array == 3).all()
        window.close()
        with pytest.raises(ValueError, match="this window is closed"):
            window.put(x, 1)

    threads(2).run(check)


def test_only_shared_arrays(threads: World) -> None:
    def check(comm: Communicator) -> None:
        for array in (np.ones(4), comm.empty((4, 4), np.float32)[:, 1]):
            with pytest.raises(ValueError, match="expected a contiguous array from empty"):
                comm.window(array)
        comm.window(comm.empty(4)).close()

    threads(2).run(check)


def test_the_others_are_told_of_a_wrong_array() -> None:
    def check(comm: Communicator) -> None:
        mine = np.ones(4) if comm.rank == 0 else comm.empty(4)
        with pytest.raises(ValueError if comm.rank == 0 else MismatchError, match="from empty"):
            comm.window(mine)

    with Threads(2) as world:
        world.run(check)


def test_types_must_agree(threads: World) -> None:
    def check(comm: Communicator) -> None:
        array = comm.empty(4, np.float32 if comm.rank == 0 else np.int32)
        with pytest.raises(MismatchError, match="give arrays of one type"):
            comm.window(array)
        with comm.window(comm.empty(0 if comm.rank else 4, np.float32)) as window:
            window.put(np.empty(0, np.float32), 1)  # an array without elements

    threads(2).run(check)


def test_a_window_is_no_part_of_a_batch(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with comm.batch(), pytest.raises(UnsupportedError, match="window is not possible"):
            comm.window(comm.empty(4))

    threads(2).run(check)


def test_memory_stays_until_all_ranks_close(threads: World) -> None:
    def check(comm: Communicator) -> None:
        comm.window(comm.empty(100_000, np.float32))  # the program drops window and array
        held = comm.shared_bytes
        comm.barrier()
        assert comm.shared_bytes == held and held >= 400_000
        other = comm.window(comm.empty(100_000, np.float32))
        more = comm.shared_bytes
        other.close()
        array = other.array
        assert comm.shared_bytes < more
        del array

    threads(2).run(check)


def test_timeout_names_the_signal() -> None:
    with Threads(2, timeout_s=0.3) as world:

        def check(comm: Communicator) -> None:
            window = comm.window(comm.empty(4, np.float32))
            if comm.rank == 0:
                text = "wait for signal 1 of rank 1: .*0 signals"
                with pytest.raises(unisono.CommunicationError, match=text):
                    window.wait(1)
                with pytest.raises(unisono.CommunicationError):
                    window.put(np.zeros(1, np.float32), 1)

        world.run(check)


def test_threads_of_a_rank_share_a_window(threads: World) -> None:
    def check(comm: Communicator) -> None:
        array = comm.empty(4000, np.int64)
        with comm.window(array) as window:

            def put(part: int) -> None:
                for at in range(part * 1000, (part + 1) * 1000):
                    window.put(np.array([at]), 1 - comm.rank, at, signal=True)

            workers = [threading.Thread(target=put, args=(part,)) for part in range(4)]
            for worker in workers:
                worker.start()
            window.wait(1 - comm.rank, 4000)
            for worker in workers:
                worker.join()
            assert (array == np.arange(4000)).all()

    threads(2).run(check)


def test_stats_count_accesses(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with comm.window(comm.empty(100, np.float32)) as window:
            before = comm.stats()
            window.put(np.ones(10, np.float32), 1 - comm.rank, signal=True)
            window.wait(1 - comm.rank)
            window.get(np.ones(3, np.float32), 1 - comm.rank)
            step = (comm.stats() - before).operations
        assert (step["put"].calls, step["put"].bytes_sent) == (1, 40)
        assert (step["get"].calls, step["get"].bytes_received) == (1, 12)
        assert (step["signal"].calls, step["wait"].calls) == (1, 1)

    threads(2).run(check)

"""Batches that are refused, that raise, or whose ranks disagree or are lost."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ranks import Me, Processes, Threads
from time_limits import limit_s
from unisono import (
    AbortedError,
    Communicator,
    MismatchError,
    UnisonoError,
    UnsupportedError,
)

World = Callable[[int], Threads]


def test_an_error_of_a_function_in_a_batch_reaches_all_ranks() -> None:
    def check(comm: Communicator) -> None:
        def careful(a: Any, b: Any) -> Any:
            if comm.rank == 1:
                raise ArithmeticError("no good")
            return a + b

        with comm.batch():
            comm.all_reduce(np.ones(3), careful)
        comm.barrier()

    with Threads(3) as world:
        first, second, third = world.outcomes(check)
    assert isinstance(second, ArithmeticError)
    for outcome in (first, third):
        assert isinstance(outcome, AbortedError)
        assert "careful raised ArithmeticError: no good" in str(outcome)


def test_what_is_refused(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = np.ones(3)
        with comm.batch() as batch:
            with pytest.raises(UnsupportedError, match="already open"), comm.batch():
                pass
            with pytest.raises(UnsupportedError, match="split is not possible inside a batch"):
                comm.split(0)
            with pytest.raises(
                UnsupportedError, match="needs these counts as an argument, or async_op=True"
            ):
                comm.all_gather_v(x)
            with pytest.raises(UnsupportedError, match=r"op: expected .* not 'mean'"):
                comm.all_reduce(x, "mean")
            with pytest.raises(UnisonoError, match="wait after the block"):
                batch.wait()
            assert not batch.is_completed()
            comm.all_reduce(x)
        with pytest.raises(UnsupportedError, match="used before"), batch:
            pass
        assert x.tolist() == [2] * 3

    threads(2).run(check)


def two(count: int) -> list[NDArray[Any]]:
    return [np.empty(count), np.empty(count)]


def own(comm: Communicator, x: Any) -> Any:
    return np.split(x, comm.size)[comm.rank]


@pytest.mark.parametrize(
    "calls",
    [
        lambda c, x: (c.all_reduce(x), c.all_reduce(x)),
        lambda c, x: (c.all_reduce(x[:60]), c.send(x[50:], 0)),
        lambda c, x: (c.all_gather(x[:2], x[10:14]), c.recv(x[13:], 0)),
        lambda c, x: (c.recv(x, 0), c.all_to_all(x.copy(), x)),
        # the lengths of the second call are known after an exchange
        lambda c, x: (c.all_reduce(x), c.all_gather_v(x[:5], out=two(5))),
        lambda c, x: (c.all_gather_v(np.ones(2), out=[x[:2], x[2:4]]), c.send(x[1:3], 0)),
        lambda c, x: (c.all_to_all([x[:2], x[3:5]], [x[5:7], x[8:10]]), c.recv(x[9:], 0)),
        lambda c, x: (c.recv(x[::2], 0), c.all_to_all_v(x[::2], [25, 25], out=two(25))),
        lambda c, x: (c.scatter_v(x if c.rank == 0 else None, out=x[:50]), c.recv(x[9:], 0)),
        lambda c, x: (c.all_reduce(x, np.minimum), c.recv(x[:1], 0)),
        # both calls read the same array
        lambda c, x: (c.reduce_scatter(x, own(c, x)), c.send(own(c, x), 0)),
    ],
)
def test_calls_that_depend_on_each_other_are_refused(
    calls: Callable[[Communicator, Any], Any], threads: World
) -> None:
    def check(comm: Communicator) -> None:
        x = np.ones(100)
        batch = comm.batch()
        with pytest.raises(ValueError, match="share memory that one of them writes"), batch:
            calls(comm, x)
        with pytest.raises(AbortedError, match="cancelled on this rank by ValueError"):
            batch.wait()
        with comm.batch():  # two reads are allowed
            for dst in range(2):
                comm.send(x, dst)
            comm.recv(np.zeros(100), 0)
            comm.recv(np.zeros(100), 1)
            y = comm.all_gather(x)
        assert y.size == 200

    threads(2).run(check)


LARGE = 20_000  # elements of an array that no pack takes


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])  # float16 is reduced in a float32 copy
@pytest.mark.parametrize(
    "calls",
    [
        lambda c, x: (c.all_reduce(x[0]), c.all_reduce(x[0])),
        lambda c, x: (c.all_reduce(x[0], "max"), c.broadcast(x[0], 1)),
        lambda c, x: (c.reduce(x[0], 0), c.reduce(x[0], 1)),
        lambda c, x: (c.all_reduce(x[0]), c.all_reduce(x[0, 5:10])),
        lambda c, x: (c.reduce_scatter(x[0]), c.all_reduce(x[0])),
        lambda c, x: (c.all_reduce(x[0]), c.recv(x[0, :5], 0)),
        # elements that are not adjacent, of arrays that are packed and that are not
        lambda c, x: (c.all_reduce(x[:, ::2]), c.all_reduce(x[:, ::2])),
        lambda c, x: (c.all_reduce(x[:, :2]), c.all_reduce(x[:, 1:3])),
        lambda c, x: (c.all_reduce(x[:, 0]), c.all_reduce(x[1, :5])),
        lambda c, x: (c.all_reduce(x[:, ::2]), c.all_reduce(x[1])),
        lambda c, x: (c.all_reduce(x[:, 0]), c.recv(x[:, 0], 0)),
    ],
)
def test_large_and_strided_calls_that_depend_on_each_other_are_refused(
    calls: Callable[[Communicator, Any], Any], dtype: str, kind: str, threads: World
) -> None:
    torch = pytest.importorskip("torch")

    def check(comm: Communicator) -> None:
        x = np.ones((2, LARGE), dtype)
        array = x if kind == "numpy" else torch.from_numpy(x)
        with pytest.raises(ValueError, match="share memory that one of them writes"), comm.batch():
            calls(comm, array)
        assert (x == 1).all()

    threads(2).run(check)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_calls_on_different_parts_of_an_array_are_allowed(dtype: str, threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = np.ones((2, LARGE), dtype)
        with comm.batch():
            comm.all_reduce(x[:, ::2])
            comm.all_reduce(x[:, 1:-1:2])
            comm.all_reduce(x[:, -1])
        assert (x == 2).all()
        with comm.batch():
            comm.all_reduce(x[0])
            comm.all_reduce(x[1, :5])
            comm.all_reduce(x[1, 5:])
        assert (x == 4).all()
        others = x.copy()
        with comm.batch():  # only rank 0 changes x, and every rank reads `others` twice
            comm.reduce(x[0], 0)
            comm.gather(others[0], root=0)
            comm.gather(others[0], root=1)
        assert (x[0] == (8 if comm.rank == 0 else 4)).all()

    threads(2).run(check)


def test_a_block_that_raises_begins_nothing(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = np.ones(3)
        before = comm._group.calls
        batch = comm.batch()
        with pytest.raises(ZeroDivisionError), batch:
            comm.send(x, 1 - comm.rank)
            works = [comm.all_reduce(x, async_op=True), comm.barrier(async_op=True)]
            works.append(comm.recv(x, 1 - comm.rank, async_op=True))
            _ = 1 // 0
        # the only call is internal: it reports the refusal to ranks that begin the same batch
        assert comm._group.calls == before + 1
        for work in [*works, batch]:
            assert work.is_completed()
            assert isinstance(work.exception(), AbortedError)
            with pytest.raises(AbortedError, match="by ZeroDivisionError: integer division"):
                work.wait()
        assert x.tolist() == [1] * 3
        assert comm.all_reduce(x).tolist() == [2] * 3  # the communicator still works

    threads(2).run(check)


# ---- failures


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (
            lambda c: [c.all_reduce(np.ones(k)) for k in ((3, 5) if c.rank else (5, 3))],
            r"lengths of the pieces",
        ),
        (
            lambda c: [c.all_reduce(np.ones(3)) for _ in range(1 + c.rank)],
            r"rank 0 called all_reduce\(sum, float64\[3\]\), rank 1 called .*float64\[6\]",
        ),
        (
            lambda c: (c.send(np.ones(3), 1 - c.rank), c.recv(np.ones(3 + c.rank), 1 - c.rank)),
            r"rank 0 sent 24 bytes.*rank 1 receives 32",
        ),
    ],
)
def test_ranks_whose_batches_differ_get_an_error(
    calls: Callable[[Communicator], Any], text: str
) -> None:
    def check(comm: Communicator) -> float:
        started = time.monotonic()
        with pytest.raises(MismatchError) as caught:
            with comm.batch():
                calls(comm)
            comm.barrier()
        assert re.search(text, str(caught.value)), str(caught.value)
        return time.monotonic() - started

    with Threads(2) as world:
        took = world.outcomes(check)
    assert all(isinstance(seconds, float) for seconds in took), took
    assert max(took) < limit_s(1)


def killed_in_a_batch(me: Me) -> None:
    comm = me.join()
    comm.barrier()
    me.say("ready")
    if me.rank == 1:
        time.sleep(60)
    x, out = np.ones(500_000), np.zeros(500_000)

    def batch() -> None:
        with comm.batch():
            for peer in range(3):
                if peer != me.rank:
                    comm.send(x, peer)
                    comm.recv(out if peer == 1 else out.copy(), peer)
            if me.rank == 2:
                comm.all_reduce(np.ones(3))

    me.attempt("raised", batch)
    me.attempt("again", comm.barrier)


def test_a_peer_that_is_killed_in_a_batch_is_named() -> None:
    with Processes(killed_in_a_batch, 3) as ranks:
        ranks.wait_for("ready", range(3))
        time.sleep(0.3)
        pid = ranks.processes[1].pid
        killed = ranks.signal(1, signal.SIGKILL)
        raised = ranks.wait_for("raised", [0, 2])
        again = ranks.wait_for("again", [0, 2])
        for entry in raised + again:
            assert entry["error"] == "PeerLostError"
            assert entry["text"] == f"rank 1 (pid {pid}) is gone"
        print(f"raised after {[round(entry['at'] - killed, 3) for entry in raised]} s")
        assert max(entry["at"] - killed for entry in raised) < limit_s(1)
        assert ranks.exit_codes() == [0, -signal.SIGKILL, 0]

"""Single copy between ranks that are processes and read each other's memory directly."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ranks import Me, Processes
from time_limits import limit_s
from unisono import Communicator

MOST_S = 3.0
_CLONE_NEWPID = 0x20000000
KIB = 1 << 10
PIECES = (16 * KIB, 40 * KIB + 4, 600 * KIB)
"""Bytes: staged; single copy of part of a page; single copy in several blocks."""


@pytest.fixture(autouse=True)
def _require_single_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_SINGLE_COPY", "always")


def is_used(comm: Communicator, op: str = "all_to_all") -> bool:
    return comm.explain(op, 64 * KIB * comm.size).single_copy


def given(rank: int, count: int) -> Any:
    return np.random.default_rng(rank).integers(-1000, 1000, count).astype(np.float32)


def calls(me: Me) -> None:
    comm = me.join()
    me.say("used", yes=is_used(comm), no=comm.explain("all_to_all", 64).single_copy)
    for child in (comm, comm.split(me.rank % 2, key=-me.rank)):
        assert child is not None
        for nbytes in PIECES:
            _check(child, nbytes // 4)
    me.say("right")


def _check(comm: Communicator, count: int) -> None:
    n, rank = comm.size, comm.rank
    whole = [given(q, n * count) for q in range(n)]
    mine = whole[rank].copy()
    pieces = [x.reshape(n, count) for x in whole]

    out = np.zeros_like(mine)
    comm.all_to_all(mine, out)
    assert np.array_equal(out, np.concatenate([p[rank] for p in pieces]))
    same = mine.copy()
    comm.all_to_all(same, same)
    assert np.array_equal(same, out)
    # A call returns after all readers have finished, so the input may change immediately.
    mine[:] = -1
    mine[:] = whole[rank]

    comm.all_gather(mine[:count], out)
    assert np.array_equal(out, np.concatenate([p[0] for p in pieces]))
    part = out[rank * count : (rank + 1) * count]
    out[:] = 0
    part[:] = mine[count : 2 * count] if n > 1 else mine[:count]
    comm.all_gather(part, out)
    assert np.array_equal(out, np.concatenate([p[min(1, n - 1)] for p in pieces]))

    summed = np.zeros(count, np.float32)
    comm.reduce_scatter(mine, summed)
    assert np.array_equal(summed, sum(p[rank] for p in pieces))
    works = [comm.all_to_all(mine, np.zeros_like(mine), async_op=True) for _ in range(3)]
    results = [work.wait() for work in works]
    assert all(np.array_equal(r, np.concatenate([p[rank] for p in pieces])) for r in results)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_results_equal_those_of_numpy(ranks: int) -> None:
    with Processes(calls, ranks) as job:
        for said in job.wait_for("used", range(ranks)):
            assert said["yes"]
            assert not said["no"]
        job.wait_for("right", range(ranks))


def uneven(me: Me) -> None:
    comm = me.join()
    peers = range(comm.size)
    send = [4 * KIB * (me.rank * (q + 1)) for q in peers]
    out = comm.all_to_all_v(np.full(sum(send), me.rank, np.float32), send, pieces=True)
    assert [len(piece) for piece in out] == [4 * KIB * (q * (me.rank + 1)) for q in peers]
    assert all((piece == q).all() for q, piece in enumerate(out))
    me.say("right")


def test_uneven_pieces_give_numpys_results() -> None:
    with Processes(uneven, 5) as job:
        job.wait_for("right", range(5))


def never(me: Me) -> None:
    comm = me.join()
    me.say("used", yes=is_used(comm))


def test_the_setting_of_rank_0_applies_to_all() -> None:
    def environment(rank: int) -> dict[str, str]:
        return {} if rank else {"UNISONO_SINGLE_COPY": "never"}

    with Processes(never, 3, environment=environment) as job:
        assert not any(said["yes"] for said in job.wait_for("used", range(3)))


def calls_from_apart(me: Me) -> None:
    if me.rank == 1:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(_CLONE_NEWPID) == 0, os.strerror(ctypes.get_errno())
        if child := os.fork():
            os.waitpid(child, 0)
            return
    calls(me)


@pytest.mark.skipif(os.geteuid() != 0, reason="a namespace of process numbers takes root")
def test_ranks_in_different_pid_namespaces_use_staging() -> None:
    """Tests that ranks in different PID namespaces use staging buffers. A process id is valid only
    in its own namespace, so a rank cannot read the other ranks' memory.
    """
    with Processes(calls_from_apart, 3) as job:
        assert not any(said["yes"] for said in job.wait_for("used", range(3)))
        job.wait_for("right", range(3))


def shares_and_dies(me: Me) -> None:
    comm = me.join()
    x = np.ones(comm.size * (64 << 20) // 4, np.float32)
    out = np.zeros_like(x)
    comm.all_to_all(x, out)
    me.say("ready")
    for _ in range(1000):
        try:
            comm.all_to_all(x, out)
        except Exception as error:
            me.say("raised", error=type(error).__name__, text=str(error))
            return


def test_a_rank_that_dies_while_others_read_from_it_is_named() -> None:
    with Processes(shares_and_dies, 3) as job:
        job.wait_for("ready", range(3))
        time.sleep(0.1)
        killed = job.signal(1, signal.SIGKILL)
        for said in job.wait_for("raised", [0, 2]):
            assert said["error"] == "PeerLostError", said
            assert f"rank 1 (pid {job.processes[1].pid}) is gone" in said["text"]
            assert said["at"] - killed < limit_s(MOST_S)


def gives_up(me: Me) -> None:
    comm = me.join()
    x = np.ones(comm.size * (1 << 20) // 4, np.float32)
    if me.rank == 1:
        comm.all_to_all(x)
        comm.abort("enough")
    me.attempt("raised", lambda: [comm.all_to_all(x) for _ in range(10)])


def test_an_aborting_rank_ends_the_call_of_its_readers() -> None:
    with Processes(gives_up, 3) as job:
        for said in job.wait_for("raised", range(3)):
            assert said["error"] == "AbortedError"
            assert "enough" in said["text"]


def ends(me: Me) -> None:
    comm = me.join()
    rng = np.random.default_rng(1)
    times = []
    for nbytes in rng.integers(0, 200 * KIB, 60):
        times.append(time.monotonic())
        comm.all_to_all(np.ones(comm.size * int(nbytes), np.uint8))
        comm.all_reduce(np.ones(int(nbytes), np.uint8))
    assert all(a <= b for a, b in pairwise(times))
    me.say("right")


def test_staged_and_single_copy_calls_may_alternate() -> None:
    with Processes(ends, 4) as job:
        job.wait_for("right", range(4))

"""Memory of shared arrays: its lifetime and limits, and groups that have none."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bootstrap.test_segment_creation import deny_memfd
from ranks import Me, Processes, Threads
from unisono import AbortedError, Communicator

Array = NDArray[Any]
World = Callable[[int], Threads]


def test_memory_is_counted_freed_and_used_again(threads: World) -> None:
    def check(comm: Communicator) -> None:
        gc.collect()
        before = comm.shared_bytes
        x = comm.empty((10, 100_000), np.float64)
        assert comm.shared_bytes - before >= x.nbytes
        assert x.ctypes.data % 64 == 0 and x.shape == (10, 100_000) and x.flags.writeable
        address, view = x.ctypes.data, x[3:]
        del x
        assert comm.shared_bytes > before
        del view
        assert comm.shared_bytes == before
        y = comm.empty_like(np.empty((10, 100_000)))
        assert (y.ctypes.data, y.dtype) == (address, np.float64)

    world = threads(2)
    world.run(check)


def test_a_freed_large_array_returns_its_pages() -> None:
    with Threads(1) as world:
        comm = world.comms[0]
        x = comm.empty(64 << 20, np.uint8)
        x[:] = 1
        used = _shared_memory_kib()
        del x
        assert used - _shared_memory_kib() > 60 << 10


def _shared_memory_kib() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssShmem"))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), "f4"), (0, "f4"), ((3, 0), "f8"), (5, "S0"), (7, "M8[s]"), (9, "f4,i8"), ((2, 3), "c8")],
)
def test_shapes_and_types(shape: Any, dtype: str, threads: World) -> None:
    def check(comm: Communicator) -> None:
        x, like = comm.empty(shape, dtype), np.empty(shape, dtype)
        assert (x.shape, x.dtype) == (like.shape, like.dtype)

    threads(1).run(check)


def test_impossible_arrays_are_refused(threads: World) -> None:
    def check(comm: Communicator) -> None:
        for count in (1 << 45, (1 << 61) - 1, 1 << 80):
            with pytest.raises(MemoryError, match="no room for a shared array of"):
                comm.empty(count)
        with pytest.raises(ValueError, match="expected dimensions of at least 0"):
            comm.empty((2, -1))
        with pytest.raises(TypeError, match="expected elements of a fixed size"):
            comm.empty(2, object)
        with pytest.raises(TypeError):
            comm.empty(1.5)  # type: ignore[arg-type]
        assert comm.all_reduce(comm.empty(1) * 0).sum() == 0

    threads(2).run(check)


def test_arrays_outlive_their_communicator() -> None:
    def check(comm: Communicator) -> Array:
        x = comm.empty(50_000)
        x[:] = comm.rank + 1
        comm.all_reduce(x)
        comm.close()
        with pytest.raises(AbortedError):
            comm.empty(10)
        return x

    with Threads(2) as world:
        arrays = world.run(check)
    del world
    gc.collect()
    for x in arrays:
        assert (x == 3).all()
        x[:] = 5
    assert (arrays[0] == 5).all()


# ---- processes


def calls(me: Me) -> None:
    comm = me.join()
    x = comm.empty(300_001, np.float32)
    for step in range(20):
        x[:] = me.rank + step
        comm.all_reduce(x)
        assert (x == sum(range(me.size)) + me.size * step).all()
    out = comm.all_gather(x[:30_000], comm.empty(me.size * 30_000, np.float32))
    me.say("done", total=float(out.sum()), shared=comm.shared_bytes > 0)


def test_ranks_that_are_processes() -> None:
    with Processes(calls, 3) as job:
        for said in job.wait_for("done", range(3)):
            assert said["total"] == 90_000 * 60.0 and said["shared"]


def in_a_sandbox(me: Me) -> None:
    deny_memfd()
    comm = me.join()
    x = comm.empty(100_000)
    x[:] = 1
    me.say("done", total=comm.all_reduce(x).sum(), shared=comm.shared_bytes)


def with_a_limit(me: Me) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    comm = me.join()
    x = comm.empty(100_000)
    x[:] = 1
    me.say("done", total=comm.all_reduce(x).sum(), shared=comm.shared_bytes)


@pytest.mark.parametrize("body", [in_a_sandbox, with_a_limit])
def test_groups_without_shared_heaps_give_ordinary_arrays(body: Callable[[Me], None]) -> None:
    with Processes(body, 2) as job:
        for said in job.wait_for("done", range(2)):
            assert (said["total"], said["shared"]) == (200_000, 0)


def forks(me: Me) -> None:
    comm = me.join()
    x = comm.empty(40_000)
    x[:] = 1
    child = os.fork()
    if child == 0:
        assert (x == 1).all()
        x[7] = 5  # the memory is that of the parent
        with pytest.raises(AbortedError, match="fork"):
            comm.empty(10)
        del x
        gc.collect()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    me.say("forked", code=code, seen=x[7], total=comm.all_reduce(x).sum(), used=comm.shared_bytes)


def test_forked_children_share_the_memory_and_free_nothing() -> None:
    with Processes(forks, 2) as job:
        for said in job.wait_for("forked", range(2)):
            assert (said["code"], said["seen"], said["total"]) == (0, 5, 2 * 40_004)
            assert said["used"] >= 40_000 * 8

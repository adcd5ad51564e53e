"""Lifetimes of handles, arrays and communicators that are dropped or collected while a call is
pending.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import calls_at_exit
import unisono
from ranks import Threads, unique_name
from unisono import AbortedError, Communicator, native
from unisono.communicator import count_exchange
from unisono.errors import CommunicationError

World = Callable[[int], Threads]


def test_a_dropped_handle_still_completes(threads: World) -> None:
    def check(comm: Communicator) -> None:
        for _ in range(3):
            comm.all_reduce(np.ones(50_000), async_op=True)
            comm.send(np.arange(100_000), (comm.rank + 1) % 3, async_op=True)
            gc.collect()
        out = np.zeros(100_000, np.int64)
        for _ in range(3):
            comm.recv(out, (comm.rank - 1) % 3)
            assert (out == np.arange(100_000)).all()
        assert comm.all_reduce(np.ones(2)).tolist() == [3, 3]

    threads(3).run(check)


DROPPED_HANDLES = """
import sys, threading
import numpy as np
import unisono

def rank():
    comm = unisono.init()
    sys.setswitchinterval(1e-6)

    def begin():
        for _ in range(400):
            comm.all_reduce(np.ones(20_000), async_op=True)

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    comm.barrier()

if __name__ == "__main__":
    unisono.run(rank, ranks=2)
"""


def test_dropped_handles_do_not_free_memory_in_use(tmp_path: Path) -> None:
    # a separate program, since a write to freed memory would crash it
    program = tmp_path / "program.py"
    program.write_text(DROPPED_HANDLES)
    environment = {**os.environ, "MALLOC_PERTURB_": "85"}
    done = subprocess.run(
        [sys.executable, program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("call", calls_at_exit.CALLS)
def test_the_interpreter_ends_during_a_call_of_a_daemon_thread(call: str) -> None:
    program = calls_at_exit.program(call, unique_name())
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=110, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pending_message_does_not_keep_finished_arrays(threads: World) -> None:
    def check(comm: Communicator) -> int:
        late = comm.recv(np.zeros(1), 1 - comm.rank, tag=7, async_op=True)
        arrays = []
        for _ in range(20):
            # longer than the time after which a call moves to the progress thread
            time.sleep(0.005 * comm.rank)
            x = np.ones(50_000)
            comm.all_reduce(x, async_op=True)
            arrays.append(weakref.ref(x))
            del x
            comm.barrier()
        comm.send(np.ones(1), 1 - comm.rank, tag=7)
        late.wait()
        return sum(array() is not None for array in arrays)

    assert max(threads(2).run(check)) < 10


def test_a_dropped_communicator_leaves() -> None:
    name = unique_name()
    gone = threading.Event()

    def leave() -> None:
        comm = unisono.init(1, 2, name)
        comm.barrier()
        del comm
        gc.collect()
        gone.set()

    beside = threading.Thread(target=leave)
    beside.start()
    with unisono.init(0, 2, name) as comm:
        comm.barrier()
        assert gone.wait(20)
        with pytest.raises(unisono.PeerLostError, match="rank 1 left"):
            comm.barrier()
    beside.join(10)


def test_a_communicator_may_be_collected_in_its_progress_thread(
    threads: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests that the garbage collector may collect the communicator in its progress thread, while
    this thread runs Python code for an uneven all_gather. The ranks have then exchanged their
    counts of elements, but the actual call has not begun.
    """
    collected = threading.Event()
    agreed = count_exchange._agreed

    def collecting(*args: Any) -> Any:
        if native.in_progress_thread():
            gc.collect()
            collected.set()
        return agreed(*args)

    def check(comm: Communicator) -> None:
        child = comm.split(0)
        assert child is not None
        if comm.rank == 0:
            gone = weakref.ref(child)
            work = child.all_gather_v(np.ones(3), async_op=True)
            cycle: list[Any] = [child]
            cycle.append(cycle)
            del child, cycle
            assert collected.wait(20) and gone() is None
            with suppress(AbortedError):
                work.wait(20)
        else:
            time.sleep(0.1)  # meanwhile the other rank's call moves to its progress thread
            with suppress(CommunicationError):
                child.all_gather_v(np.ones(2))

    gc.disable()  # delays the collection until all objects are garbage
    try:
        monkeypatch.setattr(count_exchange, "_agreed", collecting)
        threads(2).run(check)
    finally:
        gc.enable()

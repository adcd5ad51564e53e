"""Signals and forks: Ctrl-C in a blocked call, and children of a process with an open group."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blocked_calls import instruction_of, interrupt_in
from bootstrap_stores import free_port
from connection_managers import wait_until
from ranks import Me, Processes, Threads
from time_limits import PATIENCE_S, limit_s
from unisono import AbortedError, Communicator
from unisono.transport.event_loop import EventLoop

MOST_S = 3.0

INTERRUPTED: dict[str, Callable[[Communicator], Any]] = {
    "all_reduce": lambda c: c.all_reduce(np.ones(3)),
    "recv": lambda c: c.recv(np.ones(3), 1, tag=4),
    "wait": lambda c: c.all_reduce(np.ones(3), async_op=True).wait(),
    "wait with a timeout": lambda c: c.all_reduce(np.ones(3), async_op=True).wait(30),
    "wait for a message": lambda c: c.recv(np.ones(3), 1, tag=4, async_op=True).wait(),
    "wait for a message with a timeout": lambda c: c.recv(np.ones(3), 1, 4, async_op=True).wait(30),
    "wait for the second": lambda c: [c.barrier(async_op=True) for _ in range(2)][1].wait(),
    "call behind another": lambda c: [c.barrier(async_op=True), c.all_reduce(np.ones(3))],
}


def interrupted(me: Me) -> None:
    world = me.join()
    for name, call in INTERRUPTED.items():
        pair = world.group([0, 1])
        assert pair is not None
        world.barrier()
        me.say(f"ready {name}")
        if me.rank == 0:
            interrupt_in(instruction_of(call.__code__))
            me.attempt(name, call, pair)
        else:
            me.attempt(name, pair.recv, np.ones(1), 0)


def test_ctrl_c_ends_a_blocked_call() -> None:
    with Processes(interrupted, 2) as ranks:
        for name in INTERRUPTED:
            at = ranks.wait_for(f"ready {name}", [0])[0]["at"]
            here, there = ranks.wait_for(name, [0, 1])
            times = [entry["at"] - at for entry in (here, there)]
            print(f"{name}: raised after {times[0]:.3f}, {times[1]:.3f} s")
            assert max(times) < limit_s(MOST_S)
            assert here["error"] == "KeyboardInterrupt", name
            assert there["error"] == "AbortedError", name
            assert "rank 0 was interrupted by a signal" in there["text"]


def handles_a_signal(me: Me) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    world = me.join()
    me.say("ready")
    if me.rank == 0:
        world.all_reduce(np.ones(3))
        me.say("done", seen=len(seen))
    else:
        me.wait_for_go()
        world.all_reduce(np.ones(3))


def test_a_handled_signal_does_not_disturb_a_call() -> None:
    with Processes(handles_a_signal, 2) as ranks:
        ranks.wait_for("ready", [0, 1])
        for _ in range(3):
            time.sleep(0.1)
            ranks.signal(0, signal.SIGUSR1)
        ranks.go(1)
        assert ranks.wait_for("done", [0])[0]["seen"] >= 1
        assert ranks.exit_codes() == [0, 0]


# ---- a fork


def forks(me: Me) -> None:
    world = me.join()
    world.barrier()
    if me.rank == 1:
        world.send(np.ones(1), 0)
        world.recv(np.ones(1), 0)  # after this message, all children of rank 0 have ended
        world.all_reduce(np.ones(3))
        world.send(np.full(2, 7.0), 0, tag=3)
        return world.barrier()
    work = world.all_reduce(np.ones(3), async_op=True)
    message = world.recv(np.zeros(2), 1, tag=3, async_op=True)
    actions: dict[str, Callable[[], Any]] = {
        "barrier": world.barrier,
        "all_reduce": lambda: world.all_reduce(np.ones(3)),
        "async": lambda: world.all_reduce(np.ones(3), async_op=True).wait(),
        "send": lambda: world.send(np.ones(1), 1),
        "recv": lambda: world.recv(np.ones(1), 1),
        "wait": work.wait,
        "wait with a timeout": lambda: work.wait(1),
        "message": message.wait,
        "message with a timeout": lambda: message.wait(1),
        "split": lambda: world.split(0),
    }
    quiet: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "close": world.close,
        "abort": world.abort,
        "exit": sys.exit,
    }
    for name, action in (actions | quiet).items():
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that hangs
            try:
                action()
            except AbortedError as error:
                os._exit(42 if "forked child" in str(error) else 43)
            except BaseException as error:
                if name == "exit":
                    raise
                me.say("surprise", name=name, text=repr(error))
                os._exit(44)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        me.say(name, status=status, wanted=42 if name in actions else 0)
    world.recv(np.ones(1), 1)
    world.send(np.ones(1), 1)
    assert work.wait(20).tolist() == [2] * 3
    assert message.wait(20).tolist() == [7] * 2
    world.barrier()
    me.say("names", names=[*actions, *quiet])


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_forked_child_cannot_use_or_disturb_the_group(hosts: int) -> None:
    port = free_port()

    def environment(rank: int) -> dict[str, str]:
        return {"UNISONO_HOST_ID": f"host {rank % hosts}", "UNISONO_INTERFACE": "=lo"}

    name = f"tcp://127.0.0.1:{port}"
    with Processes(forks, 2, name=name, environment=environment) as ranks:
        names = ranks.wait_for("names", [0])[0]["names"]
        found = {name: ranks.wait_for(name, [0])[0] for name in names}
        wrong = {name: e["status"] for name, e in found.items() if e["status"] != e["wanted"]}
        assert not wrong
        assert ranks.exit_codes() == [0, 0]


def blocked_signals() -> dict[str, int]:
    """Returns the blocked signals of each thread of this process, by the thread's number."""
    masks = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread may have ended since the listing
            text = (task / "status").read_text()
            masks[task.name] = int(text.partition("SigBlk:")[2].split()[0], 16)
    return masks


FAULTS = ("SEGV", "BUS", "FPE", "ILL", "ABRT", "TRAP", "SYS")


def blocks(mask: int, name: str) -> bool:
    return bool(mask >> (signal.Signals[f"SIG{name}"] - 1) & 1)


def test_threads_block_the_signals_of_others_but_not_those_of_faulthandler() -> None:
    """Tests the thread of an event loop and a progress thread. A thread that is just created blocks
    all signals for a moment.
    """
    loop, began = EventLoop(), threading.Event()
    before = blocked_signals()

    def both_threads_exist() -> bool:
        masks = [mask for thread, mask in blocked_signals().items() if thread not in before]
        return sum(blocks(mask, "INT") and not any(blocks(mask, f) for f in FAULTS)
                   for mask in masks) >= 2  # fmt: skip

    def begin(comm: Communicator) -> None:
        if comm.rank == 1:
            assert began.wait(PATIENCE_S)
            return comm.barrier()
        work = comm.barrier(async_op=True)  # moves to the progress thread, since rank 1 is late
        try:
            wait_until(both_threads_exist, 20)
        finally:
            began.set()
        return work.wait()

    loop.start("test")
    with Threads(2) as ranks:
        ranks.run(begin)
    loop.call(loop.end)
    assert loop.join(20)

"""A controller without work sleeps, and still detects a rank that died meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np

from ranks import Me, Processes
from unisono import PeerLostError
from unisono.controller import Controller

# seconds without work after which the thread no longer polls for messages of other ranks
SILENCE_S = 1.0
WATCHED_S = 1.0


def _wake_ups() -> int:
    """Returns the number of times that the controller's thread has slept and woken up."""
    (thread,) = [each for each in threading.enumerate() if each.name == "unisono-controller"]
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.rsplit("\nvoluntary_ctxt_switches:", 1)[1].split()[0])


def _idles(me: Me) -> None:
    with Controller(me.join()) as controller:
        for _ in range(6):
            controller.all_reduce("w", np.ones(4)).wait()
        time.sleep(2 * SILENCE_S)
        before = _wake_ups()
        time.sleep(WATCHED_S)
        me.say("slept", wake_ups=_wake_ups() - before)
        assert (controller.all_reduce("w", np.ones(4)).wait() == me.size).all()
        assert (controller.all_reduce("v", np.ones(3)).wait() == me.size).all()
        me.say("went on")


def test_thread_of_an_idle_controller_sleeps() -> None:
    with Processes(_idles, 2) as ranks:
        # A poll every 50 ms would wake the thread 20 times.
        assert all(fact["wake_ups"] <= 2 for fact in ranks.wait_for("slept", [0, 1]))
        ranks.wait_for("went on", [0, 1])


def _dies_while_all_idle(me: Me) -> None:
    controller = Controller(me.join())
    for _ in range(6):
        controller.all_reduce("w", np.ones(4)).wait()
    time.sleep(2 * SILENCE_S)
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(SILENCE_S)
    # rank 0 submits a tensor of the frozen plan, and rank 2 a new tensor, which needs an agreement
    name = "w" if me.rank == 0 else "v"
    me.attempt("lost", lambda: controller.all_reduce(name, np.ones(4)).wait())


def test_rank_that_died_while_all_were_idle_is_named() -> None:
    with Processes(_dies_while_all_idle, 3) as ranks:
        for fact in ranks.wait_for("lost", [0, 2]):
            assert fact["error"] == PeerLostError.__name__ and "rank 1" in fact["text"]

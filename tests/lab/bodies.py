"""What the ranks of a job do while something happens to it. Imports little: each rank does."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from lab.open_resources import open_resources, settled
from lab.traffic import Traffic
from ranks import Me
from unisono import Communicator

CALL_TIMEOUT_S = 4.0
"""Of a call that waits for a rank of which nothing can be known."""
IDLE_S = 6.0
WORK_S = 2.5
_GARBAGE_BYTES = 4096
_NEVER_SENT = 999  # a tag


def busy(me: Me) -> None:
    """Calls and messages of all sizes, on and on, until one fails."""
    _until_it_fails(me, timeout_s=30.0)


def impatient(me: Me) -> None:
    """The same with a short timeout."""
    _until_it_fails(me, timeout_s=CALL_TIMEOUT_S, blocking=False)


def receiving(me: Me) -> None:
    """Every rank waits for a message that nobody sends; nothing else goes on, nothing is owed."""
    _until_it_fails(me, timeout_s=30.0, work=receive_nothing)


def garbling(me: Me) -> None:
    """The same; asked by a signal, the rank speaks garbage to its peers."""
    _when_asked(
        lambda: _garble(_connections(star=False), random.Random(7).randbytes(_GARBAGE_BYTES))
    )
    busy(me)


def zeroing(me: Me) -> None:
    """The same with zeros."""
    _when_asked(lambda: _garble(_connections(star=False), bytes(_GARBAGE_BYTES)))
    busy(me)


def babbling(me: Me) -> None:
    """The same on the connection to rank 0 by which ranks hear of each other."""
    _when_asked(
        lambda: _garble(_connections(star=True), random.Random(7).randbytes(_GARBAGE_BYTES))
    )
    busy(me)


def _until_it_fails(
    me: Me,
    timeout_s: float,
    *,
    blocking: bool = True,
    work: Callable[[Communicator, Traffic], None] | None = None,
) -> None:
    before = open_resources()
    _one_communicator(me, timeout_s, blocking, work or messages_and_calls)
    me.say("closed", before=before, after=settled(before))


def _one_communicator(
    me: Me, timeout_s: float, blocking: bool, work: Callable[[Communicator, Traffic], None]
) -> None:
    with me.join(timeout_s) as comm:
        add_up(comm, 10)
        traffic = Traffic(comm, blocking=blocking)
        me.say("joined")
        me.attempt("ended", work, comm, traffic)
        me.say("messages", outcomes=[asdict(outcome) for outcome in traffic.outcomes()])
        me.attempt("again", comm.barrier)  # it refuses further work with the same cause


def idle(me: Me) -> None:
    """Joined, then asleep outside of calls until the fault is long over."""
    before = open_resources()
    with me.join(30.0) as comm:
        add_up(comm, 10)
        me.say("joined")
        time.sleep(IDLE_S)
        me.say("calls")
        me.attempt("ended", endless, comm)
    del comm
    me.say("closed", before=before, after=settled(before))


def patient(me: Me) -> None:
    """Works for some seconds, and checks each sum."""
    comm = me.join(CALL_TIMEOUT_S * 3)
    me.say("joined")
    me.attempt("ended", _work_for, comm, WORK_S)
    comm.close()


def endless(comm: Communicator) -> None:
    """Calls until one fails."""
    while True:
        add_up(comm, 1)
        add_up(comm, 100_000)


def messages_and_calls(comm: Communicator, traffic: Traffic) -> None:
    """Both until one fails."""
    while True:
        traffic.step(lambda: add_up(comm, 1))
        traffic.step(lambda: add_up(comm, 100_000))


def receive_nothing(comm: Communicator, traffic: Traffic) -> None:
    """Waits for the right neighbour, who waits for its own."""
    comm.recv(np.zeros(1), (comm.rank + 1) % comm.size, _NEVER_SENT)


def _work_for(comm: Communicator, seconds: float) -> None:
    deadline_s = time.monotonic() + seconds
    going = np.ones(1, dtype=np.int32)
    traffic = Traffic(comm)
    while going[0]:
        traffic.step(lambda: add_up(comm, 50_000))
        going[0] = time.monotonic() < deadline_s
        comm.all_reduce(going, "min")  # all stop at the same call
    traffic.settle()


def add_up(comm: Communicator, count: int) -> None:
    """One call, checked."""
    x = np.arange(count, dtype=np.float64) + comm.rank
    comm.all_reduce(x)
    total = np.arange(count) * comm.size + comm.size * (comm.size - 1) / 2
    assert (x == total).all()


# ---- a rank out of order


def _when_asked(action: Callable[[], None]) -> None:
    """Does it in a thread when SIGUSR1 comes, whatever the rank is busy with."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    signal.set_wakeup_fd(theirs)  # written at once, though Python's handlers wait for calls to end
    signal.signal(signal.SIGUSR1, lambda *_: None)

    def wait() -> None:
        os.read(ours, 1)
        action()

    threading.Thread(target=wait, daemon=True).start()


def _connections(*, star: bool) -> list[int]:
    """Descriptors of TCP connections: of the star, which alone is probed, or all others."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        # Nothing but sockets is opened twice: who closes a segment loses its lock.
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family != socket.AF_INET or not sock.getpeername():
                    continue
                probed = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
                if probed == star:
                    found.append(int(name))
    return found


def _garble(connections: list[int], garbage: bytes) -> None:
    """Says this on each, between whatever the rank says."""
    for connection in connections:
        with contextlib.suppress(OSError):
            select.select([], [connection], [], 1.0)
            os.write(connection, garbage)

"""Programs that ranks of a job run during a fault. They import few modules, since each rank imports
this file.
"""

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

from lab.open_resources import open_resources, resources_after
from lab.traffic import Traffic
from ranks import Me
from unisono import Communicator

CALL_TIMEOUT_S = 4.0
"""Time limit of a call that waits for a rank in an unknown state."""
IDLE_S = 6.0
WORK_S = 2.5
_GARBAGE_BYTES = 4096
_NEVER_SENT = 999  # a tag that no message has


def busy(me: Me) -> None:
    """Runs calls and messages of all sizes until one fails."""
    _until_it_fails(me, timeout_s=30.0)


def impatient(me: Me) -> None:
    """Runs `busy` with a short timeout."""
    _until_it_fails(me, timeout_s=CALL_TIMEOUT_S, blocking=False)


def receiving(me: Me) -> None:
    """Receives a message that no rank sends. The connection is otherwise unused, with no pending
    acknowledgement.
    """
    _until_it_fails(me, timeout_s=30.0, work=receive_nothing)


def garbling(me: Me) -> None:
    """Runs `busy`. After a signal, the rank sends random bytes to its peers."""
    _when_asked(
        lambda: _garble(_connections(control=False), random.Random(7).randbytes(_GARBAGE_BYTES))
    )
    busy(me)


def zeroing(me: Me) -> None:
    """Runs `busy`. After a signal, the rank sends zeros to its peers."""
    _when_asked(lambda: _garble(_connections(control=False), bytes(_GARBAGE_BYTES)))
    busy(me)


def garbling_control(me: Me) -> None:
    """Runs `busy`. After a signal, the rank sends random bytes on the control channel to rank 0."""
    _when_asked(
        lambda: _garble(_connections(control=True), random.Random(7).randbytes(_GARBAGE_BYTES))
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
    me.say("closed", before=before, after=resources_after(before))


def _one_communicator(
    me: Me, timeout_s: float, blocking: bool, work: Callable[[Communicator, Traffic], None]
) -> None:
    with me.join() as comm:
        add_up(comm, 10)
        comm.timeout_s = timeout_s
        traffic = Traffic(comm, blocking=blocking)
        me.say("joined")
        me.attempt("ended", work, comm, traffic)
        me.say("messages", outcomes=[asdict(outcome) for outcome in traffic.outcomes()])
        me.attempt("again", comm.barrier)  # a further call fails with the same cause


def idle(me: Me) -> None:
    """Joins, then sleeps without calls until long after the fault."""
    before = open_resources()
    with me.join(30.0) as comm:
        add_up(comm, 10)
        me.say("joined")
        time.sleep(IDLE_S)
        me.say("calls")
        me.attempt("ended", endless, comm)
    del comm
    me.say("closed", before=before, after=resources_after(before))


def patient(me: Me) -> None:
    """Runs calls for some seconds, and checks each sum."""
    comm = me.join(CALL_TIMEOUT_S * 3)
    me.say("joined")
    me.attempt("ended", _work_for, comm, WORK_S)
    comm.close()


def endless(comm: Communicator) -> None:
    """Runs calls until a call fails."""
    while True:
        add_up(comm, 1)
        add_up(comm, 100_000)


def messages_and_calls(comm: Communicator, traffic: Traffic) -> None:
    """Sends messages and runs calls until one of them fails."""
    while True:
        traffic.step(lambda: add_up(comm, 1))
        traffic.step(lambda: add_up(comm, 100_000))


def receive_nothing(comm: Communicator, traffic: Traffic) -> None:
    """Waits for a message from the right neighbour that is never sent, since all ranks wait so."""
    comm.recv(np.zeros(1), (comm.rank + 1) % comm.size, _NEVER_SENT)


def _work_for(comm: Communicator, seconds: float) -> None:
    deadline_s = time.monotonic() + seconds
    going = np.ones(1, dtype=np.int32)
    traffic = Traffic(comm)
    while going[0]:
        traffic.step(lambda: add_up(comm, 50_000))
        going[0] = time.monotonic() < deadline_s
        comm.all_reduce(going, "min")  # all ranks stop after the same call
    traffic.complete()


def add_up(comm: Communicator, count: int) -> None:
    """Runs one all_reduce and checks its result."""
    x = np.arange(count, dtype=np.float64) + comm.rank
    comm.all_reduce(x)
    total = np.arange(count) * comm.size + comm.size * (comm.size - 1) / 2
    assert (x == total).all()


# ---- a faulty rank


def _when_asked(action: Callable[[], None]) -> None:
    """Runs `action` in a thread when SIGUSR1 arrives, also in the middle of a call."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    # The wakeup descriptor is written at once. Python's signal handlers run only after a call.
    signal.set_wakeup_fd(theirs)
    signal.signal(signal.SIGUSR1, lambda *_: None)

    def wait() -> None:
        os.read(ours, 1)
        action()

    threading.Thread(target=wait, daemon=True).start()


def _connections(*, control: bool) -> list[int]:
    """Returns the descriptors of the control channels, or those of all other TCP connections. Only
    control channels have keepalive probes.
    """
    found = []
    for name in os.listdir("/proc/self/fd"):
        # Duplicates only sockets. A shared memory segment has a file lock, which this process would
        # lose if it closed a duplicate of the segment's descriptor.
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family != socket.AF_INET or not sock.getpeername():
                    continue
                probed = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
                if probed == control:
                    found.append(int(name))
    return found


def _garble(connections: list[int], garbage: bytes) -> None:
    """Sends the bytes on each connection, between the rank's own messages."""
    for connection in connections:
        with contextlib.suppress(OSError):
            select.select([], [connection], [], 1.0)
            os.write(connection, garbage)

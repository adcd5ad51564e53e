"""Calls of a connection manager that interrupt another call or run in the manager's own thread.

A signal handler or the garbage collector may call the manager between any two steps of a call. The
collector may also run in the manager's thread. No call may wait for itself.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from connection_managers import SECRET, WORLD, make_manager, peer_infos_of, wait_until
from group_resources import descriptors
from signal_steps import Step
from time_limits import PATIENCE_S
from unisono.errors import AbortedError
from unisono.rank_connections import connection_manager, control_group, world_connections
from unisono.rank_connections.connection_manager import ConnectionManager
from unisono.transport import event_loop

_WATCHED = (
    control_group.__file__,
    world_connections.__file__,
    event_loop.__file__,
    connection_manager.__file__,
)


@pytest.fixture(autouse=True)
def waits_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the timeouts of `leave` and `close` longer than the test waits, so that a wait that
    only a timeout ends is a hang.
    """
    monkeypatch.setattr(connection_manager, "_STOP_S", 10 * PATIENCE_S)


def alone() -> ConnectionManager:
    """Returns the connection manager of a world with one rank."""
    found = make_manager()
    found.join(world=WORLD, secret=SECRET, rank=0, peer_infos=peer_infos_of([found]), timeout_s=5)
    return found


def interrupt_at(step: int, call: Callable[[], Any], handler: Callable[[], Any]) -> bool:
    """Interrupts `call` before a step. Returns False if the call ends before this step. Fails if a
    call hangs.
    """

    def handle() -> None:
        with suppress(AbortedError):
            handler()

    traced = Step(step, handle, _WATCHED)

    def run() -> None:
        sys.settrace(traced)
        with suppress(AbortedError):
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), f"hangs when it is interrupted at step {step}"
    return traced.reached


CALLS: dict[str, Callable[[ConnectionManager], Any]] = {
    "leave": lambda p: p.leave(b"a group"),
    "reach": lambda p: p.reach(b"a group", [0], 0),
    "a word for a vote": lambda p: p.send(b"a group", 0, b"text"),
}


@pytest.mark.parametrize("interrupting", CALLS)
@pytest.mark.parametrize("interrupted", CALLS)
def test_a_call_may_interrupt_a_call(interrupted: str, interrupting: str) -> None:
    one = alone()
    steps = 0
    while interrupt_at(steps, lambda: CALLS[interrupted](one), lambda: CALLS[interrupting](one)):
        steps += 1
    assert steps > 30
    one.close()


@pytest.mark.parametrize("interrupting", ["close", "leave"])
def test_a_call_may_interrupt_close(interrupting: str) -> None:
    handlers = {"close": ConnectionManager.close, "leave": CALLS["leave"]}
    before = descriptors()
    for step in itertools.count():
        one = alone()
        reached = interrupt_at(step, one.close, lambda one=one: handlers[interrupting](one))
        wait_until(lambda: not descriptors() - before)
        if not reached:
            break
    assert step > 30


def test_the_thread_itself_may_leave_and_close(caplog: pytest.LogCaptureFixture) -> None:
    """Tests that the manager's own thread may leave a group and close the manager, as happens when
    the garbage collector frees a communicator in this thread.
    """
    before = descriptors()
    one = alone()

    def collect() -> None:
        one.leave(b"a group")
        one.close()

    one._loop.call(collect)
    wait_until(lambda: not descriptors() - before)
    assert not caplog.records

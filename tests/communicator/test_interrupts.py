"""Signal handlers that raise between any two steps of Python, or make calls themselves.

The arrays of a call that has begun must stay valid after the error, since other threads still read
and write these arrays.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

from ranks import Threads
from signal_steps import Step
from unisono import Communicator
from unisono.bootstrap.group_network import GroupNetwork, TransportKind
from unisono.communicator import engine, work
from unisono.communicator.work import Work
from unisono.errors import UnisonoError

COUNT = 1 << 17  # a message so large that its sender waits for the receiver
SLOW = np.int64(0)  # a tag whose type makes the call run Python code
_WATCHED = (engine.__file__, work.__file__)


class CallCounter:
    """A native object that counts the calls that have begun."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._native, name)
        if name not in ("begin", "submit_pieces"):
            return found

        def begin(*args: Any) -> Any:
            begun = found(*args)
            self.calls += 1
            return begun

        return begin


def raise_interrupt() -> None:
    """Raises KeyboardInterrupt, as Python's default signal handler does."""
    raise KeyboardInterrupt


def interrupt_at(
    step: int, call: Callable[[], Any], handler: Callable[[], None] = raise_interrupt
) -> bool:
    """Runs a signal handler before a step of the call. Returns False if the call ends before this
    step.
    """
    traced = Step(step, handler, _WATCHED)
    before = sys.gettrace()
    sys.settrace(traced)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return traced.reached


CALLS: dict[str, Callable[[Communicator, Any], Any]] = {
    "a call that is known": lambda c, x: c.all_reduce(x, async_op=True),
    "a call": lambda c, x: c.all_reduce(x[::2], async_op=True),
    "send": lambda c, x: c.send(x, 1, SLOW, async_op=True),
    "recv": lambda c, x: c.recv(x, 1, SLOW, async_op=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_arrays_of_a_begun_call_outlive_an_interrupt(name: str) -> None:
    def attempt(comm: Communicator, step: int) -> bool:
        comm.all_reduce(np.ones(COUNT))
        if comm.rank == 1:
            return False
        x = np.zeros(COUNT)
        held = weakref.ref(x)
        group, messages = comm._engine.group, comm._engine.messages
        spies: list[Any] = [CallCounter(group), CallCounter(messages)]
        comm._engine.group, comm._engine.messages = spies
        before = group.calls
        reached = interrupt_at(step, partial(CALLS[name], comm, x))
        del x
        comm._engine.group, comm._engine.messages = group, messages
        begun = any(spy.calls for spy in spies) or group.calls > before
        assert held() is not None or not begun, f"the array was dropped at step {step}"
        return reached

    def was_reached(step: int) -> bool:
        # Each step uses a new group: an interrupted call counts as a call of rank 0, but rank 1
        # makes no such call.
        with Threads(2) as world:
            return bool(world.run(attempt, step)[0])

    assert next(step for step in itertools.count() if not was_reached(step)) > 10


def test_a_handler_may_wait_for_the_call_whose_wait_it_interrupts() -> None:
    def attempt(comm: Communicator, step: int) -> bool:
        x = np.ones(8)
        work = comm.all_reduce(x[::2], async_op=True)
        assert isinstance(work, Work)

        def handler() -> None:
            # raised if the interrupted thread is already completing the result
            with suppress(UnisonoError):
                assert work.wait() is work.wait()

        reached = interrupt_at(step, work.wait, handler)
        assert work.wait().tolist() == [comm.size] * 4
        assert x[1::2].tolist() == [1] * 4
        return reached

    with Threads(2) as world:
        assert next(step for step in itertools.count() if not any(world.run(attempt, step))) > 10


def test_the_next_call_makes_connections_that_an_interrupt_prevented() -> None:
    class Interrupted:
        reached: ClassVar[list[int]] = []

        def reach(self, name: bytes, peers: Iterable[int], transport: TransportKind) -> None:
            if not self.reached:
                self.reached.append(-1)
                raise KeyboardInterrupt
            self.reached += peers

    roads: Any = Interrupted()
    span = GroupNetwork(roads, b"", 0, (0, 1), ((0,), (1,)))
    with pytest.raises(KeyboardInterrupt):
        span.reach(range(len(span.members)), TransportKind.COLLECTIVES)
    span.reach(range(len(span.members)), TransportKind.COLLECTIVES)
    assert roads.reached == [-1, 1]

"""A signal handler may raise between any two steps of Python: the arrays of a call that has begun
must outlive that, for other threads still read and write them."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest

from ranks import Threads
from unisono import Communicator
from unisono.communicator import engine, work

COUNT = 1 << 17  # a message of more than a mailbox holds
_WATCHED = (engine.__file__, work.__file__)


class Begun:
    """A native group that remembers the arrays which calls began with."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        if name not in ("send", "receive", "submit_pieces"):
            return found

        def begin(*args: Any) -> Any:
            begun = found(*args)
            self.calls += 1
            return begun

        return begin


def interrupt_at(step: int, call: Callable[[], Any]) -> bool:
    """Whether there was such a step: the handler of a signal raises before it."""
    steps = itertools.count()
    reached = False

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal reached
        if frame.f_code.co_filename not in _WATCHED:
            return None
        frame.f_trace_opcodes = True
        if event in ("call", "opcode") and next(steps) == step:
            reached = True
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return reached


CALLS: dict[str, Callable[[Communicator, Any], Any]] = {
    "a call that is known": lambda c, x: c.all_reduce(x, async_op=True),
    "a call": lambda c, x: c.all_reduce(x[::2], async_op=True),
    "send": lambda c, x: c.send(x, 1, async_op=True),
    "recv": lambda c, x: c.recv(x, 1, async_op=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_arrays_of_a_call_that_has_begun_outlive_an_interrupt(name: str) -> None:
    def attempt(comm: Communicator, step: int) -> bool:
        comm.all_reduce(np.ones(COUNT))
        if comm.rank == 1:
            return False
        x = np.zeros(COUNT)
        held = weakref.ref(x)
        native = comm._engine.group
        spy: Any = Begun(native)
        comm._engine.group = spy
        before = native.calls
        reached = interrupt_at(step, partial(CALLS[name], comm, x))
        del x
        comm._engine.group = native
        begun = spy.calls > 0 or native.calls > before
        assert held() is not None or not begun, f"the array was dropped at step {step}"
        return reached

    def was_reached(step: int) -> bool:
        # A group for each: what was interrupted has its place among the calls.
        with Threads(2) as world:
            return bool(world.run(attempt, step)[0])

    assert next(step for step in itertools.count() if not was_reached(step)) > 10

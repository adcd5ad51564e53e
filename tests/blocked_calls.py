"""Signals that reach a process while its main thread waits in a call.

A test that sends such a signal after a fixed delay interrupts another instruction if the machine is
busy.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

_TICK_S = 0.1


def interrupt_in(is_inside: Callable[[FrameType], Any], number: int = signal.SIGINT) -> None:
    """Sends a signal to this process when its main thread waits.

    The thread waits if `is_inside(frame)`, with the thread's current frame, returns the same value
    other than None at two successive ticks. Uses SIGALRM.
    """
    before: list[Any] = [None]

    def tick(_: int, frame: FrameType | None) -> None:
        now = None if frame is None else is_inside(frame)
        if now is not None and now == before[0]:
            os.kill(os.getpid(), number)
            return
        before[0] = now
        signal.setitimer(signal.ITIMER_REAL, _TICK_S)

    signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, _TICK_S)


def instruction_of(call: CodeType) -> Callable[[FrameType], Any]:
    """Returns a function `is_inside` for a thread that stays at one instruction during `call`."""

    def is_inside(frame: FrameType) -> Any:
        return (id(frame), frame.f_lasti) if _is_on_stack(frame, call.co_filename, call) else None

    return is_inside


def code_of(folder: str) -> Callable[[FrameType], Any]:
    """Returns a function `is_inside` for a thread that runs code of a folder of unisono."""
    return lambda frame: True if _is_on_stack(frame, f"/unisono/{folder}/") else None


def _is_on_stack(frame: FrameType | None, file: str, code: CodeType | None = None) -> bool:
    while frame is not None:
        if file in frame.f_code.co_filename and code in (None, frame.f_code):
            return True
        frame = frame.f_back
    return False

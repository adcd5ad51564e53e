"""Runs a signal handler before a chosen bytecode instruction, since a signal may arrive at any
one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any


class Step:
    """A trace function for `sys.settrace` that calls `handler` before step `number`. Steps are the
    calls and the bytecode instructions in the watched files.
    """

    def __init__(
        self, number: int, handler: Callable[[], object], watched: Collection[str]
    ) -> None:
        self.reached = False
        self._number = number
        self._handler = handler
        self._watched = watched
        self._steps = itertools.count()

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in self._watched:
            return None
        frame.f_trace_opcodes = True
        if event in ("call", "opcode") and next(self._steps) == self._number:
            self.reached = True
            self._handler()
        return self

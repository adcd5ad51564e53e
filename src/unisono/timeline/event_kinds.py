"""The events of a timeline, and their layout in memory."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

import numpy as np


class EventKind(IntEnum):
    """Kind of an event. `name`, `number` and `value` are fields of the event."""

    SUBMITTED = 1
    """The program submitted the tensor `name`, of `value` bytes."""
    LAUNCHED = 2
    """Collective `number` began; `name` is its first tensor. `value`: the bucket of a plan that it
    carries, or 0 if its tensors follow as FUSED."""
    FUSED = 3
    """The tensor `name`, of `value` bytes, travels in collective `number`."""
    TRANSFERRED = 4
    """Collective `number` ran from `begun_ns` to `ended_ns`. At `time_ns`, the program learned of
    the end. `value` is 1, or 0 if some rank was not ready; the tensors then wait further."""
    WAITED = 5
    """The program waited for the tensor `name` from `begun_ns` to `ended_ns`."""
    BEGUN = 6
    """The phase `name` of step `number` began."""
    ENDED = 7
    """The phase `name` of step `number` ended."""
    FAILED = 8
    """An error ended the controller, or the tensor `name`."""
    PLANNED = 9
    """The tensor `name`, of `value` bytes, is in bucket `number`. Repeated now and then, since the
    ring loses old events."""


ENTRY: Final = struct.Struct("<QqqqqqIHHQ")
"""Sequence number, time, begin, end, number, value, name, kind, thread, sequence number again.

The first number is written first and the last one last, so a reader finds entries that are being
written, or that a killed process left unfinished."""

ENTRY_DTYPE: Final = np.dtype(
    [
        ("sequence", "<u8"),
        ("time_ns", "<i8"),
        ("begun_ns", "<i8"),
        ("ended_ns", "<i8"),
        ("number", "<i8"),
        ("value", "<i8"),
        ("name", "<u4"),
        ("kind", "<u2"),
        ("thread", "<u2"),
        ("check", "<u8"),
    ]
)
assert ENTRY_DTYPE.itemsize == ENTRY.size == 64  # one line of a CPU's cache

CONTROLLER_THREAD: Final = "unisono-controller"
"""The name of a controller's own thread. Its waits are not those of the program."""
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
OPTIMIZER: Final = "optimizer"
PHASES: Final = (FORWARD, BACKWARD, OPTIMIZER)

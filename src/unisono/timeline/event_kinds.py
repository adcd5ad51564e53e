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
    """Collective `number` began; `name` is its first tensor. `value` is the number of its bucket,
    or 0 if FUSED events with its tensors follow."""
    FUSED = 3
    """Collective `number` carries the tensor `name`, of `value` bytes."""
    TRANSFERRED = 4
    """Collective `number` ran from `begun_ns` to `ended_ns`. At `time_ns`, the program was notified
    of the end. `value` is 1, or 0 if a rank was not ready; in this case the tensors continue to
    wait."""
    WAITED = 5
    """The program waited for the tensor `name` from `begun_ns` to `ended_ns`."""
    BEGUN = 6
    """The phase `name` of step `number` began."""
    ENDED = 7
    """The phase `name` of step `number` ended. `begun_ns` is its begin, or 0 if a BEGUN event
    recorded the begin."""
    FAILED = 8
    """An error ended the controller. `name` is the type of the error."""
    PLANNED = 9
    """The tensor `name`, of `value` bytes, is in bucket `number`. This event is repeated from time
    to time, because the ring buffer overwrites old events."""


ENTRY: Final = struct.Struct("<QqqqqqIHHQ")
"""Layout of an event: sequence number, time, begin, end, number, value, name, kind, thread, and the
sequence number again.

The two sequence numbers are written first and last. If they differ, the event is being written, or
a process was killed while it wrote the event."""

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
assert ENTRY_DTYPE.itemsize == ENTRY.size == 64  # the size of a cache line

CONTROLLER_THREAD: Final = "unisono-controller"
"""Name of a controller's own thread, whose waits do not delay the program."""
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
OPTIMIZER: Final = "optimizer"
PHASES: Final = (FORWARD, BACKWARD, OPTIMIZER)

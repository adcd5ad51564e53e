"""The messages between workers and servers: their tags, and the heads before gradients.

For each shard and step, a worker sends one head, then one gradient message for each range. The
server replies with the values of each range. Tags contain the kind of a message and the number of
its shard or range.
"""

from __future__ import annotations

from enum import IntEnum
from math import nan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_KIND_BITS = 32
_HEAD_BYTES = 16
FINISHED = -1
"""The step number with which a worker announces its end."""


class Kind(IntEnum):
    """The kind of a message. The tag contains the kind and the number of a shard or range."""

    HEAD = 1
    GRADIENT = 2
    VALUES = 3
    END = 4
    """A server's message to each worker that all workers have finished."""


def tag_of(kind: Kind, number: int) -> int:
    """Returns the tag of a message about the shard or range of this number.

    >>> tag_of(Kind.HEAD, 5) == (1 << 32) + 5
    True
    """
    return (kind << _KIND_BITS) + number


def head_bytes(tensors: int) -> int:
    """Returns the size of the head for a shard with elements of `tensors` tensors, in bytes."""
    return _HEAD_BYTES + tensors


class Push(NamedTuple):
    """A worker's announcement of the gradients of a step, or of its end."""

    step: int
    """The step, or `FINISHED`."""
    used: Bytes
    """A 1 for each tensor of the shard that has a gradient, and a 0 for each other tensor."""
    learning_rate: float = nan
    """The learning rate of the step; NaN if the worker does not set it."""


def write_head(head: Bytes, push: Push) -> None:
    """Fills a head with the announcement of a push."""
    head[:8].view(np.int64)[0] = push.step
    head[8:_HEAD_BYTES].view(np.float64)[0] = push.learning_rate
    head[_HEAD_BYTES:] = push.used


def read_head(head: Bytes) -> Push:
    """Returns the announcement in a head.

    >>> head = np.zeros(head_bytes(3), np.uint8)
    >>> write_head(head, Push(7, np.array([1, 0, 1], np.uint8), 0.5))
    >>> step, used, learning_rate = read_head(head)
    >>> step, used.tolist(), learning_rate
    (7, [1, 0, 1], 0.5)
    """
    step = int(head[:8].view(np.int64)[0])
    learning_rate = float(head[8:_HEAD_BYTES].view(np.float64)[0])
    return Push(step, head[_HEAD_BYTES:].copy(), learning_rate)

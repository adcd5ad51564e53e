"""The interface of a device whose memory other ranks can open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.types import DType, ReduceOp

EXPORT_WORDS = 12
"""Number of 64-bit words that describe memory to peers; see `PeerDevice.export`."""

EVENT_WORDS = 2
"""Number of 64-bit words that describe a message's event to peers."""

Words = NDArray[np.int64]


class Event(IntEnum):
    """The events that each rank has, for other ranks to wait on. Their records are numbered."""

    READY = 0
    """The rank's data is ready."""
    PHASE = 1
    """The rank's moves of a phase have ended."""
    DONE = 2
    """The rank's moves of a call have ended."""


class Address(NamedTuple):
    """A position in the memory of a rank, as this rank reaches it."""

    rank: int
    value: int


class PeerDevice(Protocol):
    """Memory, streams and events of this rank's device, for ranks of one host.

    All methods that enqueue work use the current stream of the calling thread.
    """

    performers: Sequence[int]
    """For each rank, the rank that issues moves into its memory; valid after `connect`."""

    def connect(self) -> None:
        """Exchanges with all ranks what the other methods need. Collective over the ranks."""

    def export(self, tensor: torch.Tensor) -> Words:
        """Returns `EXPORT_WORDS` words with which other ranks can open a tensor's memory.

        Raises `UnsupportedError` for memory that other ranks cannot open.
        """

    def address(self, rank: int, words: Words) -> Address:
        """Returns the address of a tensor that a rank has exported, on this rank."""

    def fold(
        self,
        targets: Sequence[Address],
        sources: Sequence[Address],
        nbytes: int,
        dtype: DType,
        op: ReduceOp,
        divisor: int,
    ) -> None:
        """Enqueues the reduction of `sources` in their order, written to all `targets`.

        With one source this is a copy. AVG divides by `divisor`. A target may be a source.
        """

    def record(self, event: Event, number: int) -> None:
        """Enqueues record `number` of an event of this rank. Numbers grow."""

    def wait(self, rank: int, event: Event, number: int) -> None:
        """Makes the current stream wait for record `number` of an event of a rank.

        The other rank must have called `record` before.
        """

    def record_message(self) -> Words:
        """Enqueues the record of an event for one message; returns the event's `EVENT_WORDS`."""

    def wait_message(self, rank: int, words: Words) -> None:
        """Makes the current stream wait for an event that a rank has recorded for a message."""

    def has_recorded(self, rank: int, event: Event, number: int) -> bool:
        """Returns True if a rank's device has reached record `number` of an event."""

    def release(self, number: int) -> None:
        """Lets streams go on that wait for records up to about `number`, after a failure."""

    def has_lost_rank(self) -> bool:
        """Returns True if the process of a rank has ended before the rank left."""

    def mark(self) -> Any:
        """Returns the current position of the current stream."""

    def wait_mark(self, mark: Any) -> None:
        """Makes the current stream wait for a position of a stream of this rank."""

    def has_passed(self, mark: Any) -> bool:
        """Returns True if the device has reached a position."""

    def synchronize(self, mark: Any) -> None:
        """Blocks the host until the device has reached a position."""

    def enqueue(self, work: Callable[[], object]) -> None:
        """Enqueues operations of torch on the current stream."""

    def keep(self, tensors: object) -> None:
        """Keeps an object, and its tensors, until the device has ended the stream's work so far."""

    def on_side_stream(self) -> AbstractContextManager[None]:
        """Returns a context with this rank's stream for communication as current stream."""

    def close(self) -> None:
        """Waits for the device, leaves, and frees the memory of other ranks that is open."""

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

EXPORT_WORDS = 10
"""Number of 64-bit words with which peers open an allocation; see `PeerDevice.export`."""

MOST_FREED = 8
"""Largest number of allocations that `PeerDevice.freed` returns at once."""

EVENT_WORDS = 2
"""Number of 64-bit words that describe a message's event to peers."""

Words = NDArray[np.int64]
Launch = Callable[[], None]
"""Enqueues prepared work on the current stream."""


class Event(IntEnum):
    """The events that each rank has, for other ranks to wait on. Their records are numbered."""

    READY = 0
    """The rank's data is ready."""
    MOVED = 1
    """The rank's moves of a phase, or of a call, have ended."""


class SideStream(IntEnum):
    """The streams of a rank beside the program's."""

    CALLS = 0
    """Collectives and messages that the program does not wait for at once."""
    DOWN = 1
    """Copies from the device to the host."""
    UP = 2
    """Copies from the host to the device."""


class Address(NamedTuple):
    """A position in the memory of a rank, as this rank reaches it."""

    rank: int
    value: int


class Record(NamedTuple):
    """A record of an event of this rank: number `base + offset`, for the base of the call."""

    event: Event
    offset: int


class Wait(NamedTuple):
    """A wait for record `base + offset` of an event of a rank."""

    rank: int
    event: Event
    offset: int


class PeerDevice(Protocol):
    """Memory, streams and events of this rank's device, for ranks of one host.

    All methods that enqueue work use the current stream of the calling thread.
    """

    performers: Sequence[int]
    """For each rank, the rank that issues moves into its memory; valid after `connect`."""

    def connect(self) -> None:
        """Exchanges with all ranks what the other methods need. Collective over the ranks; raises
        `UnsupportedError` on all of them."""

    def locate(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Returns the number of a tensor's allocation and the tensor's offset in it; zeros for a
        tensor without elements.

        An allocation has its number for as long as it lives. No later allocation of this process
        has the same number. Raises `UnsupportedError` for memory of another device.
        """

    def export(self, allocation: int) -> Words:
        """Returns `EXPORT_WORDS` words with which other ranks can open an allocation that `locate`
        has found. Raises `UnsupportedError` for memory that other ranks cannot open."""

    def freed(self) -> list[int]:
        """Returns at most `MOST_FREED` allocations that were exported and no longer exist, each
        once."""

    def open(self, rank: int, allocation: int, words: Words) -> None:
        """Opens an allocation that a rank has exported, unless it is open."""

    def release_memory(self, rank: int, allocation: int) -> None:
        """Closes an allocation that its rank has freed, if it is open."""

    def address(self, rank: int, allocation: int, offset: int) -> Address:
        """Returns the address in an open allocation of a rank, or in one of this rank."""

    def prepare(
        self,
        targets: Sequence[Address],
        sources: Sequence[Address],
        nbytes: int,
        dtype: DType,
        op: ReduceOp,
        divisor: int,
    ) -> Launch:
        """Prepares the reduction of `sources` in their order, written to all `targets`.

        With one source this is a copy. AVG divides by `divisor`. A target may be a source. The
        result may be called more than once.
        """

    def batch(self, records: Sequence[Record], waits: Sequence[Wait]) -> Callable[[int], None]:
        """Prepares records of events, after which the current stream waits for others.

        The result takes the base of the numbers, and may be called more than once. Numbers of an
        event grow. The other ranks may record later than this rank waits.
        """

    def record_message(self) -> Words:
        """Enqueues the record of an event for one message; returns the event's `EVENT_WORDS`."""

    def wait_message(self, rank: int, words: Words) -> None:
        """Makes the current stream wait for an event that a rank has recorded for a message."""

    def has_recorded(self, rank: int, event: int, number: int) -> bool:
        """Returns True if a rank's device has reached a record of an event, also of a message."""

    def release(self) -> None:
        """Lets all streams go on that wait for records, after a failure."""

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

    def selected(self) -> AbstractContextManager[None]:
        """Returns a context in which this device is torch's current device."""

    def on_side_stream(self, stream: SideStream = SideStream.CALLS) -> AbstractContextManager[None]:
        """Returns a context with a stream of this rank as current stream."""

    def staging(self, nbytes: int) -> torch.Tensor:
        """Returns bytes of host memory that the device copies to and from without the host."""

    def close(self) -> None:
        """Waits for the device, leaves, and frees the memory of other ranks that is open."""

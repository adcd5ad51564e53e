"""Point-to-point messages between tensors in device memory.

The sender's header carries its memory and an event; it travels as a message in host memory, which
matches source and tag. The receiver copies from the sender's memory and answers with an event.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from unisono.errors import CommunicationError, MismatchError, UnsupportedError
from unisono.torch_backend.device.call_queue import DeviceCall
from unisono.torch_backend.device.lost_rank_watch import LostRankWatch
from unisono.torch_backend.device.peer_device import (
    EVENT_WORDS,
    EXPORT_WORDS,
    Address,
    PeerDevice,
    Words,
)
from unisono.torch_backend.private import hide_from_dynamo
from unisono.types import DType, ReduceOp

_MEMORY = 4  # word of a header after bytes, tag of the answer, allocation and offset
_EVENT = _MEMORY + EXPORT_WORDS
_HEADER = _EVENT + EVENT_WORDS
_ANSWER = 1 + EVENT_WORDS  # bytes that the receiver expected, event
_FAILED = -1  # instead of the bytes in a header or an answer
_FIRST_ANSWER_TAG = 1 << 62  # above the tags of programs


class WatchedMessages:
    """The flags of messages for which streams of this rank wait."""

    def __init__(self, device: PeerDevice, watch: LostRankWatch) -> None:
        self._device, self._watch = device, watch
        self._waits: deque[tuple[int, int, int]] = deque()
        watch.follow(self._has_ended)

    def wait(self, rank: int, words: Words) -> None:
        """Makes the current stream wait for a flag; if its rank dies, the stream goes on."""
        self._device.wait_message(rank, words)
        self._waits.append((rank, int(words[0]), int(words[1])))
        self._watch.begin()

    def _has_ended(self) -> bool:
        while self._waits:
            if not self._device.has_recorded(*self._waits[0]):
                return False
            self._waits.popleft()
        return True


class SendCall(DeviceCall):
    """The handle of a send, which ends when the receiver's answer has arrived."""

    __slots__ = ("_answer", "_answered", "_header", "_sent", "_settled", "_to", "_waits", "_x")

    def __init__(
        self, device: PeerDevice, waits: WatchedMessages, x: torch.Tensor, to: int
    ) -> None:
        super().__init__(device)
        self._x, self._to, self._waits = x, to, waits  # the receiver reads the memory of x
        self._answer = np.zeros(_ANSWER, np.int64)
        self._settled = threading.Lock()

    def begin(self, comm: Any, header: Words, tag: int) -> None:
        """Sends the header, and begins the receive of the answer."""
        self._header = header
        self._answered = comm.recv(self._answer, self._to, int(header[1]), async_op=True)
        self._sent = comm.send(header, self._to, tag, async_op=True)

    def wait(self, timeout_s: float | None = None) -> None:
        self._sent.wait(timeout_s)
        self._answered.wait(timeout_s)
        with self._settled:
            if not self._ended.is_set():
                self._settle()
        super().wait(timeout_s)
        self._device.keep(self._x)

    def _settle(self) -> None:
        expected, sent = int(self._answer[0]), int(self._header[0])
        if expected == _FAILED:
            self.end(
                error=CommunicationError(f"rank {self._to} cannot read the memory of a message")
            )
            return
        if expected != sent:
            self.end(error=_length_error(sent, self._to, expected))
            return
        with self._device.on_side_stream():
            self._waits.wait(self._to, self._answer[1:])
            self.end(self._device.mark())

    def is_completed(self) -> bool:
        if not (self._sent.is_completed() and self._answered.is_completed()):
            return False
        if self.exception() is None:
            self.wait_for_answer()
        return super().is_completed() or self.exception() is not None

    def wait_for_answer(self) -> None:
        """Takes note of an answer that has arrived."""
        with self._settled:
            if not self._ended.is_set():
                self._settle()

    def exception(self) -> Exception | None:
        found = self._sent.exception() or self._answered.exception()
        return found or super().exception()


class DeviceMessages:
    """Sends and receives of a group over peer memory."""

    def __init__(self, comm: Any, device: PeerDevice, watch: LostRankWatch) -> None:
        self._comm, self._device = comm, device
        self._waits = WatchedMessages(device, watch)
        self._tags = itertools.count(_FIRST_ANSWER_TAG)

    def send(self, x: torch.Tensor, dst: int, tag: int) -> SendCall:
        """Begins a send. The receiver reads `x` when it receives."""
        header = np.zeros(_HEADER, np.int64)
        header[0], header[1] = x.nbytes, next(self._tags)
        try:
            header[2], header[3] = self._device.locate(x)
            if header[2]:
                header[_MEMORY:_EVENT] = self._device.export(int(header[2]))
            header[_EVENT:] = self._device.record_message()
        except UnsupportedError:
            header[0] = _FAILED  # the receiver must not wait
            self._comm.send(header, dst, tag, async_op=True)
            raise
        call = SendCall(self._device, self._waits, x, dst)
        call.begin(self._comm, header, tag)
        return call

    def recv(
        self,
        x: torch.Tensor,
        src: int | None,
        tag: int,
        finish: Callable[[], None] | None,
        later: bool,
    ) -> DeviceCall:
        """Receives into `x`, in this thread, or later in a thread of its own."""
        call = DeviceCall(self._device, finish)
        if not later:
            call.end(None, source=self._receive(x, src, tag))
            return call
        mark = self._device.mark()
        header = np.zeros(_HEADER, np.int64)
        work = self._comm.recv(header, src, tag, async_op=True)

        def receive() -> None:
            try:
                work.wait()
                with self._device.on_side_stream():
                    self._device.wait_mark(mark)
                    self._copy(x, work.source_rank(), header)
                    end = self._device.mark()
                call.end(end, source=work.source_rank())
            except Exception as error:
                call.end(error=error)

        threading.Thread(target=receive, name="unisono-device-recv", daemon=True).start()
        return call

    def _receive(self, x: torch.Tensor, src: int | None, tag: int) -> int:
        header = np.zeros(_HEADER, np.int64)
        source = self._comm.recv(header, src, tag)
        self._copy(x, source, header)
        return int(source)

    def _copy(self, x: torch.Tensor, source: int, header: Words) -> None:
        """Enqueues the copy of a message, and answers."""
        sent = int(header[0])
        if sent == _FAILED:
            raise CommunicationError(f"rank {source} cannot share the memory of a message")
        answer = np.zeros(_ANSWER, np.int64)
        answer[0] = x.nbytes
        try:
            if sent == x.nbytes and sent:
                self._read(x, source, header)
            answer[1:] = self._device.record_message()
        except Exception:
            answer[0] = _FAILED
            raise
        finally:
            self._comm.send(answer, source, int(header[1]))
        if sent != x.nbytes:
            raise _length_error(sent, self._comm.rank, x.nbytes)

    def _read(self, x: torch.Tensor, source: int, header: Words) -> None:
        device, (allocation, offset) = self._device, header[2:_MEMORY].tolist()
        device.locate(x)  # raises an error for a tensor of another device
        self._waits.wait(source, header[_EVENT:])
        device.open(source, allocation, header[_MEMORY:_EVENT])
        memory = device.address(source, allocation, offset)
        own = Address(self._comm.rank, x.data_ptr())
        device.prepare([own], [memory], x.nbytes, DType.UINT8, ReduceOp.SUM, 1)()


def _length_error(sent: int, to: int, expected: int) -> CommunicationError:
    return MismatchError(
        f"a message of {sent} bytes was sent to rank {to}, which receives {expected} bytes; "
        "expected tensors of equal length"
    )


hide_from_dynamo(SendCall, WatchedMessages, DeviceMessages)

"""Collectives and messages on device tensors through host memory.

Data is copied from the device to pinned memory, goes through the communicator, and is copied back.
This works for all ranks, also on several hosts. Collectives are divided into blocks: while a block
goes through the communicator, the next one is copied down and the one before is copied up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from unisono.communicator import fail_group
from unisono.errors import MismatchError
from unisono.torch_backend.device.call_header import (
    DeviceRequest,
    decode,
    encode,
    require_matching,
)
from unisono.torch_backend.device.call_queue import DeviceCall
from unisono.torch_backend.device.flat_tensors import overlap
from unisono.torch_backend.device.host_blocks import BLOCK_BYTES, HostBlocks
from unisono.torch_backend.device.peer_device import SideStream
from unisono.torch_backend.private import hide_from_dynamo
from unisono.types import Op

_SLOTS = 3  # one is copied down, one is in the communicator, one is copied up


class HostMemory:
    """Performs collectives and messages of a group over host memory."""

    def __init__(self, comm: Any, device: Any, block_bytes: int = BLOCK_BYTES) -> None:
        """`comm`: a communicator of its own for these calls."""
        self._comm, self._device, self._block_bytes = comm, device, block_bytes
        self._slots = [_Slot(device) for _ in range(_SLOTS)]

    def run(
        self,
        request: DeviceRequest,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
    ) -> None:
        """Performs a collective: the results are enqueued on the current stream.

        Raises `MismatchError` on all ranks for calls that do not match.
        """
        comm = self._comm
        rows = comm.all_gather(encode(request, comm.size)).reshape(comm.size, -1)
        requests = [decode(words, comm.size) for words in rows]
        try:
            require_matching(requests)
        except MismatchError as error:
            fail_group(comm, error)
            raise
        if request.op is Op.BARRIER:
            return
        if source is not None and source is not target and overlap(source, target):
            source = self._copied(source)
        if request.op is Op.BROADCAST and source is not None:
            target = None  # the root has its values
        blocks = HostBlocks(requests, comm.rank, self._block_bytes)
        _Pipeline(comm, self._device, self._slots, blocks, source, target).run()

    def send(self, x: torch.Tensor, dst: int, tag: int) -> DeviceCall:
        """Begins a send of the values that `x` has now."""
        call = DeviceCall(self._device)
        work = self._comm.send(self._down(x), dst, tag, async_op=True)
        self._later(call, work.wait)
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
        call, mark = DeviceCall(self._device, finish), self._device.mark()
        received = self._staging(x)
        work = self._comm.recv(received, src, tag, async_op=True)

        def receive() -> int:
            work.wait()
            self._device.wait_mark(mark)
            self._device.enqueue(lambda: x.copy_(received, non_blocking=True))
            return int(work.source_rank())

        if later:
            self._later(call, receive)
        else:
            call.end(None, source=receive())
        return call

    def close(self) -> None:
        """Does nothing, since torch keeps the pinned memory."""

    def _later(self, call: DeviceCall, job: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                with self._device.on_side_stream():
                    source = job()
                    call.end(self._device.mark(), source=-1 if source is None else source)
            except Exception as error:
                call.end(error=error)

        threading.Thread(target=run, name="unisono-device-message", daemon=True).start()

    def _down(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor in host memory, after the current stream's work."""
        found = self._staging(x)
        self._device.enqueue(lambda: found.copy_(x, non_blocking=True))
        self._device.synchronize(self._device.mark())
        return found

    def _staging(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._device.staging(x.nbytes).view(x.dtype).view(x.shape)
        return found

    def _copied(self, x: torch.Tensor) -> torch.Tensor:
        copy = torch.empty_like(x)
        self._device.enqueue(lambda: copy.copy_(x))
        return copy


class _Slot:
    """Memory of the host for a block, which is kept, and the marks of its last copies."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._memory: dict[str, torch.Tensor] = {}
        self.is_down: Any = None
        """Reached when the input is in the slot."""
        self.is_free: Any = None
        """Reached when the output was copied from the slot."""

    def part(self, side: str, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns memory for one side of a block."""
        memory = self._memory.get(side)
        if memory is None or memory.numel() < nbytes:
            memory = self._memory[side] = self._device.staging(max(nbytes, 1))
        return memory[:nbytes].view(dtype)


class _Pipeline:
    """One collective in blocks. A single block stays on the current stream."""

    def __init__(
        self,
        comm: Any,
        device: Any,
        slots: Sequence[_Slot],
        blocks: HostBlocks,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
    ) -> None:
        self._comm, self._device, self._slots, self._blocks = comm, device, slots, blocks
        self._source, self._target = source, target
        self._is_in_place = source is target
        self._begin: Any = None

    def run(self) -> None:
        """Performs the blocks; the current stream then waits for the last copy."""
        self._begin = self._device.mark()
        self._down(0)
        for number in range(self._blocks.count):
            if number + 1 < self._blocks.count:
                self._down(number + 1)
            self._exchange(number)
            self._up(number)
        if self._target is not None:
            last = self._slot(self._blocks.count - 1)
            self._device.wait_mark(last.is_free)

    def _down(self, number: int) -> None:
        if self._source is None:
            return
        slot, device = self._slot(number), self._device
        with self._on(SideStream.DOWN):
            device.wait_mark(self._begin)
            device.wait_mark(slot.is_free)
            parts = self._blocks.inputs(number)
            device.enqueue(_copies(self._source, parts, self._sent(number), to_block=True))
            slot.is_down = device.mark()

    def _exchange(self, number: int) -> None:
        slot = self._slot(number)
        waited = slot.is_free if self._source is None else slot.is_down
        if waited is not None:
            self._device.synchronize(waited)
        self._blocks.exchange(self._comm, number, self._sent(number), self._received(number))

    def _up(self, number: int) -> None:
        if self._target is None:
            return
        slot, device, block = self._slot(number), self._device, self._received(number)
        with self._on(SideStream.UP):
            device.wait_mark(self._begin)
            parts = self._blocks.outputs(number)
            device.enqueue(_copies(self._target, parts, block, to_block=False))
            slot.is_free = device.mark()

    def _on(self, stream: SideStream) -> AbstractContextManager[None]:
        if self._blocks.count == 1:
            return nullcontext()
        found: AbstractContextManager[None] = self._device.on_side_stream(stream)
        return found

    def _slot(self, number: int) -> _Slot:
        return self._slots[number % len(self._slots)]

    def _sent(self, number: int) -> Any:
        return self._block("sent", number, self._source, self._blocks.inputs(number))

    def _received(self, number: int) -> Any:
        side = "sent" if self._is_in_place else "received"
        return self._block(side, number, self._target, self._blocks.outputs(number))

    def _block(self, side: str, number: int, like: torch.Tensor | None, parts: Any) -> Any:
        if like is None:
            return None
        return self._slot(number).part(side, sum(length for _, length in parts), like.dtype)


def _copies(
    whole: torch.Tensor, parts: Sequence[tuple[int, int]], block: torch.Tensor, *, to_block: bool
) -> Callable[[], None]:
    """Returns a function that copies parts of a flat tensor to a block, or back."""
    all_bytes, block_bytes = whole.view(torch.uint8), block.view(torch.uint8)

    def copy() -> None:
        at = 0
        for first, length in parts:
            there, here = all_bytes[first : first + length], block_bytes[at : at + length]
            (here if to_block else there).copy_(there if to_block else here, non_blocking=True)
            at += length

    return copy


hide_from_dynamo(HostMemory)

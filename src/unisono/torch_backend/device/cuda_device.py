"""A CUDA device whose memory the ranks of one host share, by CUDA's interprocess communication."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

from unisono.errors import UnsupportedError
from unisono.torch_backend.device.fold_kernel import MOST_ARRAYS, FoldKernels
from unisono.torch_backend.device.peer_device import (
    EVENT_WORDS,
    EXPORT_WORDS,
    Address,
    Event,
    Words,
)
from unisono.torch_backend.private import hide_from_dynamo
from unisono.types import DType, ReduceOp

_HANDLE_BYTES: Final = 64
_UUID_BYTES: Final = 16
_MESSAGE_EVENTS: Final = 32
_MOST_OPEN: Final = 256  # opened allocations that are kept for reuse

# torch gives these classes no types.
_Event: Any = torch.cuda.Event
_Stream: Any = torch.cuda.Stream

_OFFSET, _POINTER, _PROCESS = 8, 9, 10  # words of an export, after the handle


class CudaDevice:
    """This rank's CUDA device: events, streams, and memory of other ranks."""

    def __init__(self, comm: Any, device: torch.device) -> None:
        """`comm`: a communicator of the ranks, for `connect`."""
        self.performers: Sequence[int] = range(comm.size)
        self._comm, self._device = comm, device
        self._kernels = FoldKernels(device)
        self._side: Any = None
        self._events: list[Any] = []
        self._peer_events: list[list[Any]] = []
        self._message_events: list[tuple[Any, Words]] = []
        self._messages = 0
        self._opened_events: dict[bytes, Any] = {}
        self._opened: dict[tuple[int, bytes], int] = {}

    def connect(self) -> None:
        """Exchanges events and the identities of the devices with all ranks."""
        torch.cuda.set_device(self._device)
        self._events = [_shared_event() for _ in Event]
        mine = b"".join(event.ipc_handle() for event in self._events) + self._uuid()
        found = self._comm.all_gather(np.frombuffer(mine, np.uint8)).reshape(self._comm.size, -1)
        rows = [bytes(row) for row in found]
        uuids = [row[-_UUID_BYTES:] for row in rows]
        self.performers = [uuids.index(uuid) for uuid in uuids]
        self._peer_events = [
            self._events if rank == self._comm.rank else self._open_events(row)
            for rank, row in enumerate(rows)
        ]

    def export(self, tensor: torch.Tensor) -> Words:
        """Returns the handle of a tensor's allocation, its offset, its address and this process."""
        from cuda.bindings import driver

        words = np.zeros(EXPORT_WORDS, np.int64)
        pointer = tensor.data_ptr()
        words[_POINTER], words[_PROCESS] = pointer, os.getpid()
        if pointer == 0 or tensor.numel() == 0:
            return words
        base, _ = _checked(driver.cuMemGetAddressRange(pointer), "find an allocation")
        (handle,) = _checked(driver.cuIpcGetMemHandle(base), "share memory")
        words[:_OFFSET] = np.frombuffer(ctypes.string_at(handle.getPtr(), _HANDLE_BYTES), np.int64)
        words[_OFFSET] = pointer - int(base)
        return words

    def address(self, rank: int, words: Words) -> Address:
        """Opens the allocation of a tensor that a rank has exported, unless it is open."""
        if int(words[_PROCESS]) == os.getpid():
            return Address(rank, int(words[_POINTER]))
        key = rank, words[:_OFFSET].tobytes()
        base = self._opened.pop(key, None)
        if base is None:
            base = self._open(key[1])
        self._opened[key] = base  # the most recently used one is the last
        return Address(rank, base + int(words[_OFFSET]))

    def fold(
        self,
        targets: Sequence[Address],
        sources: Sequence[Address],
        nbytes: int,
        dtype: DType,
        op: ReduceOp,
        divisor: int,
    ) -> None:
        """Enqueues a copy by the driver, or a reduction in one pass over memory."""
        if len(sources) > MOST_ARRAYS:
            raise UnsupportedError(
                f"a reduction on a device combines at most {MOST_ARRAYS} ranks, got {len(sources)}"
            )
        if len(sources) == 1:
            dtype, op, divisor = DType.UINT8, ReduceOp.SUM, 1
        if len(sources) == len(targets) == 1:
            self._copy(targets[0].value, sources[0].value, nbytes)
            return
        for first in range(0, len(targets), MOST_ARRAYS):
            some = [each.value for each in targets[first : first + MOST_ARRAYS]]
            if first:  # a source may be a target that is written already
                self._copy_to_all(some, targets[0].value, nbytes)
            else:
                self._kernels.launch(
                    some, [each.value for each in sources], nbytes, dtype, op, divisor
                )

    def record(self, event: Event) -> None:
        """Records one of this rank's events on the current stream."""
        self._events[event].record()

    def wait(self, rank: int, event: Event) -> None:
        """Makes the current stream wait for an event of a rank."""
        self._stream().wait_event(self._peer_events[rank][event])

    def record_message(self) -> Words:
        """Records one of a few events in turn, so that a later record may replace this one; a wait
        for it then takes longer."""
        if not self._message_events:
            events = [_shared_event() for _ in range(_MESSAGE_EVENTS)]
            self._message_events = [
                (each, np.frombuffer(each.ipc_handle(), np.int64)) for each in events
            ]
        self._messages += 1
        event, words = self._message_events[self._messages % _MESSAGE_EVENTS]
        event.record()
        return words

    def wait_message(self, rank: int, words: Words) -> None:
        """Makes the current stream wait for an event of a message."""
        key = words.tobytes()
        event = self._opened_events.get(key)
        if event is None:
            own = [event for event, mine in self._message_events if mine.tobytes() == key]
            event = own[0] if own else _Event.from_ipc_handle(self._device, key)
            self._opened_events[key] = event
        self._stream().wait_event(event)

    def mark(self) -> Any:
        """Records an event of this process on the current stream."""
        event = _Event()
        event.record(self._stream())
        return event

    def wait_mark(self, mark: Any) -> None:
        """Makes the current stream wait for an event of this process; None needs no wait."""
        if mark is not None:
            self._stream().wait_event(mark)

    def has_passed(self, mark: Any) -> bool:
        """Returns True if the device has reached an event."""
        return mark is None or bool(mark.query())

    def synchronize(self, mark: Any) -> None:
        """Blocks the host until the device has reached an event."""
        mark.synchronize()

    def enqueue(self, work: Callable[[], object]) -> None:
        """Calls `work`, whose operations torch enqueues."""
        work()

    def keep(self, tensors: object) -> None:
        """Does nothing, since torch gives memory to later work of the same stream only."""

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Returns a context with the stream for communication."""
        torch.cuda.set_device(self._device)
        if self._side is None:
            self._side = _Stream(self._device)
        with torch.cuda.stream(self._side):
            yield

    def close(self) -> None:
        """Closes the memory of other ranks, after the device's work."""
        if not self._opened:
            return
        from cuda.bindings import driver

        torch.cuda.synchronize(self._device)
        for base in self._opened.values():
            driver.cuIpcCloseMemHandle(base)
        self._opened.clear()

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _uuid(self) -> bytes:
        found: Any = torch.cuda.get_device_properties(self._device).uuid
        return bytes(found.bytes)

    def _open_events(self, row: bytes) -> list[Any]:
        handles = [
            row[at : at + _HANDLE_BYTES] for at in range(0, len(row) - _UUID_BYTES, _HANDLE_BYTES)
        ]
        return [_Event.from_ipc_handle(self._device, each) for each in handles]

    def _open(self, handle: bytes) -> int:
        from cuda.bindings import driver

        if len(self._opened) >= _MOST_OPEN:
            torch.cuda.synchronize(self._device)
            oldest = next(iter(self._opened))
            driver.cuIpcCloseMemHandle(self._opened.pop(oldest))
        opened = driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, _HANDLE_BYTES)
        flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        (base,) = _checked(driver.cuIpcOpenMemHandle(opened, flag.value), "open a peer's memory")
        return int(base)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        from cuda.bindings import driver

        stream = self._stream().cuda_stream
        _checked(driver.cuMemcpyDtoDAsync(target, source, nbytes, stream), "copy")

    def _copy_to_all(self, targets: Sequence[int], source: int, nbytes: int) -> None:
        for target in targets:
            self._copy(target, source, nbytes)


def _shared_event() -> Any:
    event = _Event(interprocess=True)
    event.record()
    return event


def _checked(result: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """Returns the results of a driver call. Raises `UnsupportedError` for a failure."""
    status, *found = result
    if int(status) != 0:
        raise UnsupportedError(f"cannot {what}: the CUDA driver reports {status.name}")
    return tuple(found)


assert EVENT_WORDS * 8 == _HANDLE_BYTES

hide_from_dynamo(CudaDevice)

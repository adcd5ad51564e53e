"""A CUDA device whose memory the ranks of one host share, by CUDA's interprocess communication."""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from unisono.errors import UnsupportedError
from unisono.torch_backend.device.cuda_driver import checked
from unisono.torch_backend.device.cuda_stream import CudaStream
from unisono.torch_backend.device.flag_page import FLAG_BYTES, FLAGS, FlagPage
from unisono.torch_backend.device.fold_kernel import MOST_ARRAYS, FoldKernels
from unisono.torch_backend.device.peer_device import (
    EXPORT_WORDS,
    Address,
    Event,
    Words,
)
from unisono.torch_backend.private import hide_from_dynamo
from unisono.types import DType, ReduceOp

_HANDLE_BYTES: Final = 64
_UUID_BYTES: Final = 16
_FLAG_MASK: Final = 0xFFFFFFFF  # the device compares numbers modulo 2**32
_MOST_OPEN: Final = 256  # opened allocations that are kept for reuse

_OFFSET, _POINTER, _PROCESS = 8, 9, 10  # words of an export, after the handle


class CudaDevice(CudaStream):
    """This rank's CUDA device: flags, streams, and memory of other ranks.

    An event is a flag in host memory, which a stream writes, and on which other streams wait. The
    device handles both without a kernel. CUDA's own events would switch the device between the
    processes for each record, which takes 0.1 ms.
    """

    def __init__(self, comm: Any, device: torch.device, flags: FlagPage) -> None:
        """`comm`: a communicator of the ranks, for `connect`."""
        self.performers: Sequence[int] = range(comm.size)
        super().__init__(device)
        self._comm, self._flags = comm, flags
        self._kernels = FoldKernels(device)
        self._writers: dict[int, tuple[int, int]] = {}
        """For each flag, the stream that wrote it last, and the number."""
        self._messages = itertools.count()
        self._opened: dict[tuple[int, bytes], int] = {}

    def connect(self) -> None:
        """Exchanges the identities of the devices with all ranks."""
        torch.cuda.set_device(self._device)
        mine = np.frombuffer(self._uuid(), np.uint8)
        uuids = [row.tobytes() for row in self._comm.all_gather(mine).reshape(self._comm.size, -1)]
        self.performers = [uuids.index(uuid) for uuid in uuids]

    def export(self, tensor: torch.Tensor) -> Words:
        """Returns the handle of a tensor's allocation, its offset, its address and this process."""
        driver = self._driver
        words = np.zeros(EXPORT_WORDS, np.int64)
        pointer = tensor.data_ptr()
        words[_POINTER], words[_PROCESS] = pointer, os.getpid()
        if pointer == 0 or tensor.numel() == 0:
            return words
        base, _ = checked(driver.cuMemGetAddressRange(pointer), "find an allocation")
        (handle,) = checked(driver.cuIpcGetMemHandle(base), "share memory")
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

    def record(self, event: Event, number: int) -> None:
        """Writes the number to the event's flag when the current stream gets there."""
        self._write(int(event), number)

    def wait(self, rank: int, event: Event, number: int) -> None:
        """Makes the current stream wait until the flag of a rank's event has the number."""
        self._wait(rank, int(event), number)

    def record_message(self) -> Words:
        """Writes a flag of a message when the current stream gets there."""
        turn, place = divmod(next(self._messages), FLAGS - 1 - len(Event))
        self._write(len(Event) + place, turn + 1)
        return np.array([len(Event) + place, turn + 1])

    def wait_message(self, rank: int, words: Words) -> None:
        """Makes the current stream wait for the flag of a message."""
        self._wait(rank, int(words[0]), int(words[1]))

    def has_recorded(self, rank: int, event: Event, number: int) -> bool:
        """Returns True if the flag of a rank's event has the number."""
        ahead = (int(self._flags.values[rank, event]) - number) & _FLAG_MASK
        return ahead < 1 << 31

    def release(self, number: int) -> None:
        """Writes large numbers to all flags."""
        self._flags.release(number)

    def has_lost_rank(self) -> bool:
        """Returns True if the process of a rank has ended before the rank left."""
        return self._flags.has_lost_rank()

    def close(self) -> None:
        """Closes the memory of other ranks and unmaps the flags, after the device's work."""
        if "_flag_address" in self.__dict__:
            torch.cuda.synchronize(self._device)
            self._driver.cuMemHostUnregister(self._flags.values.ctypes.data)
            del self._flag_address
        self._flags.leave(self._comm.rank)
        for base in self._opened.values():
            self._driver.cuIpcCloseMemHandle(base)
        self._opened.clear()

    @functools.cached_property
    def _driver(self) -> Any:
        return importlib.import_module("cuda.bindings.driver")

    def _uuid(self) -> bytes:
        found: Any = torch.cuda.get_device_properties(self._device).uuid
        return bytes(found.bytes)

    @functools.cached_property
    def _flag_address(self) -> int:
        """The address at which this process's device has the flags."""
        torch.cuda.set_device(self._device)
        torch.cuda.synchronize()  # creates the context that the driver needs
        host = self._flags.values.ctypes.data
        driver = self._driver
        options = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        checked(driver.cuMemHostRegister(host, self._flags.nbytes, options), "map the flags")
        (address,) = checked(driver.cuMemHostGetDevicePointer(host, 0), "map the flags")
        return int(address)

    def _write(self, flag: int, number: int) -> None:
        """Writes a flag of this rank on the current stream, after all earlier writes of it."""
        stream = self._stream().cuda_stream
        before, last = self._writers.get(flag, (stream, 0))
        if before != stream:
            self._wait(self._comm.rank, flag, last)
        self._writers[flag] = stream, number
        address = self._flag_address + FLAG_BYTES * (FLAGS * self._comm.rank + flag)
        write = self._driver.cuStreamWriteValue32
        checked(write(stream, address, number & _FLAG_MASK, 0), "write a flag")

    def _wait(self, rank: int, flag: int, number: int) -> None:
        stream = self._stream().cuda_stream
        address = self._flag_address + FLAG_BYTES * (FLAGS * rank + flag)
        wait = self._driver.cuStreamWaitValue32
        checked(wait(stream, address, number & _FLAG_MASK, 0), "wait for a flag")

    def _open(self, handle: bytes) -> int:
        driver = self._driver
        if len(self._opened) >= _MOST_OPEN:
            torch.cuda.synchronize(self._device)
            oldest = next(iter(self._opened))
            driver.cuIpcCloseMemHandle(self._opened.pop(oldest))
        opened = driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, _HANDLE_BYTES)
        flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        (base,) = checked(driver.cuIpcOpenMemHandle(opened, flag.value), "open a peer's memory")
        return int(base)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        stream = self._stream().cuda_stream
        checked(self._driver.cuMemcpyDtoDAsync(target, source, nbytes, stream), "copy")

    def _copy_to_all(self, targets: Sequence[int], source: int, nbytes: int) -> None:
        for target in targets:
            self._copy(target, source, nbytes)


hide_from_dynamo(CudaDevice)

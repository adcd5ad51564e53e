"""Flags in host memory that CUDA streams write, and on which the streams of other ranks wait.

The device writes and compares flags without a kernel. CUDA's own events would switch the device
between the processes for each record, which takes 0.1 ms.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from unisono.torch_backend.device.cuda_driver import CudaDriver, StreamOperation
from unisono.torch_backend.device.flag_page import FLAG_BYTES, FLAGS, FlagPage
from unisono.torch_backend.device.peer_device import Record, Wait

_MOST_AT_ONCE = 255  # operations of one call of the driver
_MASK = 0xFFFFFFFF  # the device compares numbers modulo 2**32


class StreamFlags:
    """The flags of all ranks, for the streams of this rank."""

    def __init__(
        self, driver: CudaDriver, page: FlagPage, rank: int, stream: Callable[[], int]
    ) -> None:
        """`stream` returns the handle of the current stream."""
        self.driver, self.stream = driver, stream
        self._page, self._rank = page, rank
        self._start = driver.map_host(page.values.ctypes.data, page.nbytes)
        self.latest = 0
        """The largest number of a call that streams of this rank may wait for."""
        self._writers: dict[int, tuple[int, int]] = {}
        """For each flag of this rank, the stream that wrote it last, and the number."""

    def address(self, rank: int, flag: int) -> int:
        """Returns the address at which this process's device has a flag."""
        return self._start + FLAG_BYTES * (FLAGS * rank + flag)

    def follow(self, flag: int, stream: int, number: int) -> None:
        """Notes a write of a flag of this rank; lets it follow the last one of another stream."""
        before, last = self._writers.get(flag, (stream, 0))
        if before != stream:
            self.wait(self._rank, flag, last)
        self._writers[flag] = stream, number

    def write(self, flag: int, number: int) -> None:
        """Makes the current stream write a flag of this rank."""
        stream = self.stream()
        self.follow(flag, stream, number)
        address = self.address(self._rank, flag)
        operations = (StreamOperation * 1)(StreamOperation.write(address, number & _MASK))
        self.driver.batch(stream, operations)

    def wait(self, rank: int, flag: int, number: int) -> None:
        """Makes the current stream wait until a flag has a number."""
        address = self.address(rank, flag)
        operations = (StreamOperation * 1)(StreamOperation.wait(address, number & _MASK))
        self.driver.batch(self.stream(), operations)

    def has_reached(self, rank: int, flag: int, number: int) -> bool:
        """Returns True if a flag has a number."""
        ahead = (int(self._page.values[rank, flag]) - number) & _MASK
        return ahead < 1 << 31

    def close(self) -> None:
        """Ends the mapping of the flags; the device must not use them any more."""
        self.driver.unpin(self._page.values.ctypes.data)


class FlagBatch:
    """Writes of flags and waits, enqueued by one call of the driver for 255 of them."""

    def __init__(
        self, flags: StreamFlags, rank: int, records: Sequence[Record], waits: Sequence[Wait]
    ) -> None:
        self._flags = flags
        self._records = [(int(event), offset) for event, offset in records]
        given = [StreamOperation.write(flags.address(rank, each.event)) for each in records]
        given += [StreamOperation.wait(flags.address(each.rank, each.event)) for each in waits]
        parts = [
            given[first : first + _MOST_AT_ONCE] for first in range(0, len(given), _MOST_AT_ONCE)
        ]
        self._arrays = [(StreamOperation * len(part))(*part) for part in parts]
        offsets = [each.offset for each in records] + [each.offset for each in waits]
        operations = itertools.chain.from_iterable(self._arrays)
        self._numbers = list(zip(operations, offsets, strict=True))

    def __call__(self, base: int) -> None:
        """Enqueues the batch on the current stream."""
        flags = self._flags
        stream, flags.latest = flags.stream(), base
        for flag, offset in self._records:
            flags.follow(flag, stream, base + offset)
        for operation, offset in self._numbers:
            operation.number = (base + offset) & _MASK
        for operations in self._arrays:
            flags.driver.batch(stream, operations)

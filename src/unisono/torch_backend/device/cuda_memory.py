"""Allocations on a CUDA device that the processes of one host share."""

from __future__ import annotations

import os
from typing import Final

import numpy as np

from unisono.errors import UnsupportedError
from unisono.torch_backend.device.cuda_driver import HANDLE_BYTES, CudaDriver
from unisono.torch_backend.device.peer_device import EXPORT_WORDS, MOST_FREED, Words

_HANDLE_WORDS: Final = HANDLE_BYTES // 8
_BASE, _PROCESS = _HANDLE_WORDS, _HANDLE_WORDS + 1  # words of an export, after the handle


class CudaMemory:
    """The exported allocations of this process, and the open ones of other ranks.

    An allocation has the driver's number, so memory that is freed and allocated again at the same
    address is another allocation.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._starts: dict[int, int] = {}
        """The first address of each allocation of this process that was located."""
        self._exports: dict[int, Words] = {}
        self._open: dict[tuple[int, int], tuple[int, bytes]] = {}
        """The address and the handle of each open allocation; no handle for this process."""

    def locate(self, pointer: int) -> tuple[int, int]:
        """Returns the number of the allocation at an address of this process, and the offset."""
        number = self._driver.buffer_id(pointer)
        start = self._starts.get(number)
        if start is None:
            start = self._starts[number] = self._driver.start_of(pointer)
        return number, pointer - start

    def export(self, number: int) -> Words:
        """Returns the words with which other ranks open an allocation."""
        words = self._exports.get(number)
        if words is None:
            start = self._starts[number]
            words = np.zeros(EXPORT_WORDS, np.int64)
            words[:_HANDLE_WORDS] = np.frombuffer(self._driver.export(start), np.int64)
            words[_BASE], words[_PROCESS] = start, os.getpid()
            self._exports[number] = words
        return words

    def freed(self) -> list[int]:
        """Returns some exported allocations that no longer exist, each once."""
        gone = [
            number
            for number, start in list(self._starts.items())
            if not self._driver.is_allocated(start, number)
        ]
        found = [number for number in gone if number in self._exports][:MOST_FREED]
        for number in gone:
            if number in found or number not in self._exports:
                self._starts.pop(number)
                self._exports.pop(number, None)
        return found

    def open(self, rank: int, number: int, words: Words) -> None:
        """Opens an allocation of a rank, unless it is open."""
        if (rank, number) in self._open:
            return
        if int(words[_PROCESS]) == os.getpid():
            self._open[rank, number] = int(words[_BASE]), b""
            return
        handle = words[:_HANDLE_WORDS].tobytes()
        # The driver would return the memory of a freed allocation that has the same handle.
        for (owner, stale), (_, known) in list(self._open.items()):
            if owner == rank and known == handle:
                self.close(owner, stale)
        self._open[rank, number] = self._driver.open(handle), handle

    def address(self, rank: int, number: int, offset: int) -> int:
        """Returns an address in an open allocation."""
        found = self._open.get((rank, number))
        if found is None:
            raise UnsupportedError(f"rank {rank} has freed the memory of a call before its end")
        return found[0] + offset

    def close(self, rank: int, number: int) -> None:
        """Closes an allocation of a rank, if it is open."""
        start, handle = self._open.pop((rank, number), (0, b""))
        if handle:
            self._driver.close(start)

    def close_all(self) -> None:
        """Closes all allocations of other ranks."""
        for rank, number in list(self._open):
            self.close(rank, number)

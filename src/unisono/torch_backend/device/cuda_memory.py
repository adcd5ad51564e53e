"""Allocations on a CUDA device that the processes of one host share."""

from __future__ import annotations

import os
from typing import Final

import numpy as np

from unisono.errors import UnsupportedError
from unisono.torch_backend.device.cuda_driver import HANDLE_BYTES, CudaDriver
from unisono.torch_backend.device.open_memory import OpenMemory
from unisono.torch_backend.device.peer_device import EXPORT_WORDS, MOST_FREED, Words

_HANDLE_WORDS: Final = HANDLE_BYTES // 8
_BASE, _PROCESS = _HANDLE_WORDS, _HANDLE_WORDS + 1  # words of an export, after the handle


class CudaMemory:
    """The exported allocations of this process, and the open ones of other ranks.

    An allocation has the driver's number, so memory that is freed and allocated again at the same
    address is another allocation.
    """

    def __init__(self, driver: CudaDriver, opened: OpenMemory) -> None:
        """`opened`: the open allocations of all groups of this process."""
        self._driver, self.opened = driver, opened
        self._starts: dict[int, int] = {}
        """The first address of each allocation of this process that was located."""
        self._exports: dict[int, Words] = {}
        self._open: dict[tuple[int, int], tuple[int, int]] = {}
        """By rank and number: the address and the process of each open allocation."""

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
        process, start = int(words[_PROCESS]), int(words[_BASE])
        if process != os.getpid():
            start = self.opened.open(process, number, words[:_HANDLE_WORDS].tobytes())
        self._open[rank, number] = start, process

    def address(self, rank: int, number: int, offset: int) -> int:
        """Returns an address in an open allocation."""
        found = self._open.get((rank, number))
        if found is None:
            raise UnsupportedError(f"rank {rank} has freed the memory of a call before its end")
        return found[0] + offset

    def close(self, rank: int, number: int) -> None:
        """Closes an allocation of a rank, if it is open."""
        found = self._open.pop((rank, number), None)
        if found is not None and found[1] != os.getpid():
            self.opened.close(found[1], number)

    def close_all(self) -> None:
        """Closes all allocations of other ranks."""
        for rank, number in list(self._open):
            self.close(rank, number)

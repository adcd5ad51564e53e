"""Allocations of other processes that this process has open, for all its groups."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from unisono.torch_backend.device.cuda_driver import CudaDriver


@dataclass(slots=True)
class _Opened:
    start: int
    handle: bytes
    users: int


class OpenMemory:
    """Opens each allocation once, for any number of groups.

    The driver returns the memory that is open for a handle. If that memory was freed and its handle
    belongs to a later allocation, these would be the old values. So all groups of a process share
    this table, and memory with the same handle and another number is closed first.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._opened: dict[tuple[int, int], _Opened] = {}
        """By the process and its number of the allocation."""

    def open(self, process: int, number: int, handle: bytes) -> int:
        """Returns the address of an allocation of a process."""
        with self._lock:
            found = self._opened.get((process, number))
            if found is None:
                self._close_stale(process, handle)
                found = _Opened(self._driver.open(handle), handle, 0)
                self._opened[process, number] = found
            found.users += 1
            return found.start

    def close(self, process: int, number: int) -> None:
        """Ends the use of an allocation by one group."""
        with self._lock:
            found = self._opened.get((process, number))
            if found is not None:
                found.users -= 1
                if not found.users:
                    del self._opened[process, number]
                    self._driver.close(found.start)

    def __len__(self) -> int:
        return len(self._opened)

    def _close_stale(self, process: int, handle: bytes) -> None:
        for (owner, number), each in list(self._opened.items()):
            if owner == process and each.handle == handle:
                del self._opened[owner, number]
                self._driver.close(each.start)

"""A barrier for the ranks of one contestant. The barrier does not use the measured library."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

_STRIDE = 64 // 8  # number of int64 values in a cache line of 64 bytes


class StartLine:
    """A barrier in a small file that all ranks map into memory. Each rank has a counter in its own
    cache line.

    All contestants use this barrier before a measurement. The order in which their own barriers
    release ranks therefore has no influence.
    """

    def __init__(self, path: Path, *, rank: int, ranks: int) -> None:
        self._rank = rank
        with path.open("r+b") as file:
            lines = np.memmap(file, dtype=np.int64, mode="r+", shape=(ranks * _STRIDE,))
        self._counts = lines[::_STRIDE]
        self._round = 0

    @staticmethod
    def create(path: Path, ranks: int) -> None:
        """Creates the file. Call this before the ranks start."""
        path.write_bytes(bytes(ranks * _STRIDE * 8))

    def wait(self, timeout_s: float = 60.0) -> None:
        """Waits until all ranks have called this function. Raises TimeoutError if this takes more
        than `timeout_s`."""
        self._round += 1
        self._counts[self._rank] = self._round
        deadline_s = time.monotonic() + timeout_s
        while int(self._counts.min()) < self._round:
            os.sched_yield()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"a rank did not reach the barrier within {timeout_s:g} s")

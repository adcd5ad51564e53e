"""A start line for the ranks of one world that owes nothing to the library being measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

_STRIDE = 64 // 8  # one cache line per rank, in int64


class StartLine:
    """Barrier over a small file that all ranks map: each rank counts in its own line.

    All contestants start from it, so none is favoured by how its own barrier releases.
    """

    def __init__(self, path: Path, *, rank: int, ranks: int) -> None:
        self._rank = rank
        with path.open("r+b") as file:
            lines = np.memmap(file, dtype=np.int64, mode="r+", shape=(ranks * _STRIDE,))
        self._counts = lines[::_STRIDE]
        self._round = 0

    @staticmethod
    def create(path: Path, ranks: int) -> None:
        """Make the file, before the ranks start."""
        path.write_bytes(bytes(ranks * _STRIDE * 8))

    def wait(self, timeout_s: float = 60.0) -> None:
        """Return when all ranks are here. Raises TimeoutError."""
        self._round += 1
        self._counts[self._rank] = self._round
        deadline_s = time.monotonic() + timeout_s
        while int(self._counts.min()) < self._round:
            os.sched_yield()
            if time.monotonic() > deadline_s:
                raise TimeoutError("a rank of this world did not reach the start line")

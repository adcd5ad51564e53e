"""Bootstrap through MPI."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from unisono.errors import RendezvousError
from unisono.transport import load_mpi

_UNENDED: list[object] = []  # keeps requests alive: MPI may use their memory until it is finalised
_FIRST_NAP_S, _LAST_NAP_S = 20e-6, 5e-3


class MpiStore:
    """A `BootstrapStore` of all ranks that mpiexec started.

    MPI admits only ranks that its launcher started, so no secret is needed.
    """

    def __init__(self) -> None:
        self.mpi = load_mpi()
        self.comm = self.mpi.COMM_WORLD

    @property
    def secret(self) -> bytes | None:
        """None: MPI needs no secret."""
        return None

    def exchange(self, rank: int, size: int, mine: bytes, timeout_s: float) -> list[bytes]:
        """Returns the texts of all ranks, by rank. Raises `RendezvousError`."""
        if (rank, size) != (self.comm.rank, self.comm.size):
            raise RendezvousError(
                f"rank {rank} of {size} has MPI rank {self.comm.rank} of {self.comm.size}: "
                "start the program with mpiexec, and do not set another rank or size"
            )
        deadline = time.monotonic() + timeout_s
        lengths = np.zeros(size, np.int64)
        self._finish(self.comm.Iallgather(np.array([len(mine)]), lengths), deadline, timeout_s)
        texts = bytearray(int(lengths.sum()))
        receive_buffer = [texts, list(map(int, lengths)), self.mpi.BYTE]
        request = self.comm.Iallgatherv([mine, self.mpi.BYTE], receive_buffer)
        self._finish(request, deadline, timeout_s)
        ends = np.cumsum(lengths)
        return [bytes(texts[end - length : end]) for end, length in zip(ends, lengths, strict=True)]

    def _finish(self, request: Any, deadline: float, timeout_s: float) -> None:
        nap_s = _FIRST_NAP_S
        try:
            while not request.Test():
                if time.monotonic() > deadline:
                    _UNENDED.append(request)
                    raise RendezvousError(
                        f"rank {self.comm.rank} of {self.comm.size}: not all ranks that mpiexec "
                        f"started came: timeout after {timeout_s:g} s"
                    )
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, _LAST_NAP_S)
        except self.mpi.Exception as error:
            raise RendezvousError(f"the bootstrap by MPI failed: {error}") from error

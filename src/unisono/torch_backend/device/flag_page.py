"""Numbers in host memory that the devices of all ranks of one host write and wait on."""

from __future__ import annotations

import mmap
import os
import select
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UnsupportedError

FLAGS: Final = 64
"""Number of flags of each rank."""

FLAG_BYTES: Final = 4

FIRST_MESSAGE: Final = 4
"""Number of the first flag of messages; those before are events of collectives."""

MESSAGES: Final = FLAGS - FIRST_MESSAGE - 1
"""Number of flags of messages. Each message takes the next one."""

_LEFT: Final = FLAGS - 1  # written by the host of a rank that leaves in order
_FAR: Final = 1 << 30  # ahead of all numbers that a stream may wait for


class FlagPage:
    """One array of flags for all ranks, mapped in each process.

    `values[r]` holds the flags of rank r. They are in host memory, so that a process can let the
    streams go on that wait for a rank that has died.
    """

    def __init__(self, comm: Any) -> None:
        """Collective. Raises `UnsupportedError` on all ranks if a rank cannot map the memory of
        rank 0's process, for example in a container with process numbers of its own."""
        self.nbytes = -(-comm.size * FLAGS * FLAG_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("unisono-flags") if comm.rank == 0 else -1
        if comm.rank == 0:
            os.ftruncate(fd, self.nbytes)
        rows = comm.all_gather(np.array([os.getpid(), fd])).reshape(-1, 2).tolist()
        self._processes = [process for process, _ in rows]
        process, number = rows[0]
        memory = _mapped(f"/proc/{process}/fd/{number}", self.nbytes)
        opened = comm.all_gather(np.array([memory is not None]))
        if comm.rank == 0:
            os.close(fd)
        if memory is None or not opened.all():
            raise UnsupportedError("a rank cannot open the memory of another rank's process")
        self.values: NDArray[np.uint32] = np.frombuffer(memory, np.uint32)[
            : comm.size * FLAGS
        ].reshape(comm.size, FLAGS)

    def release(self, number: int) -> None:
        """Lets all streams go on that wait for numbers of events up to about `number`, or for
        messages."""
        self.values[:, :FIRST_MESSAGE] = (number + _FAR) & 0xFFFFFFFF
        self.values[:, FIRST_MESSAGE:_LEFT] = _FAR

    def leave(self, rank: int) -> None:
        """Notes that a rank leaves, and that its device has ended its work."""
        self.values[rank, _LEFT] = 1

    def has_lost_rank(self) -> bool:
        """Returns True if the process of a rank has ended before the rank left."""
        return any(
            not self.values[rank, _LEFT] and not _lives(process)
            for rank, process in enumerate(self._processes)
        )


def _lives(process: int) -> bool:
    """Returns False if a process has ended, also if its parent has not asked for its status."""
    try:
        fd = os.pidfd_open(process)
    except ProcessLookupError:
        return False
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    ended = bool(poll.poll(0))
    os.close(fd)
    return not ended


def _mapped(path: str, nbytes: int) -> mmap.mmap | None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
    except OSError:
        return None

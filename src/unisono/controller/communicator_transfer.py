"""The default transfer: two communicators of the controller's own."""

from __future__ import annotations

from unisono.communicator import (
    Call,
    Communicator,
    FusedAllReduce,
    VotedWork,
    begin_unvoted,
    begin_voted,
    call_of,
)
from unisono.controller.transfer import Job, Pending


def duplicate(comm: Communicator) -> Communicator:
    """Returns a new communicator of the same ranks. Collective."""
    part = comm.split(0, comm.rank)
    assert part is not None  # of color 0
    return part


class CommunicatorTransfer:
    """Moves data by two communicators: decided jobs by one, voted jobs by the other."""

    @staticmethod
    def over(comm: Communicator) -> CommunicatorTransfer:
        """Returns a transfer with communicators of its own for the ranks of `comm`. Collective."""
        return CommunicatorTransfer(duplicate(comm), duplicate(comm))

    def __init__(self, decided: Communicator, voted: Communicator) -> None:
        """Takes both communicators; `close` closes them."""
        self._decided = decided
        self._voted = voted
        self._fused: dict[object, FusedAllReduce] = {}

    def begin(self, job: Job) -> Pending:
        """Begins a job for which all ranks are ready."""
        return begin_unvoted(self._decided, job.operation, _call(self._decided, job))

    def begin_voted(self, job: Job | None) -> VotedWork:
        """Begins a voted job. The vote takes one reduction of 8 bytes, without Python."""
        if job is None:
            return begin_voted(self._voted, "void call", None)
        if job.key is None or job.operation != "all_reduce":
            return begin_voted(self._voted, job.operation, _call(self._voted, job))
        fused = self._fused.get(job.key)
        if fused is None:
            fused = self._fused[job.key] = FusedAllReduce(self._voted, job.arrays, job.op)
        return begin_voted(self._voted, job.operation, fused.call(job.arrays))

    def forget(self) -> None:
        """Drops what was kept for jobs that repeat."""
        self._fused.clear()

    def close(self) -> None:
        """Closes both communicators."""
        self._voted.close()
        self._decided.close()


def _call(comm: Communicator, job: Job) -> Call:
    return call_of(comm, job.operation, job.arrays, op=job.op, root=job.root, lengths=job.lengths)

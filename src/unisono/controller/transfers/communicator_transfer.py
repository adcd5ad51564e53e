"""The default transfer: two communicators that only the controller uses."""

from __future__ import annotations

from unisono.communicator import (
    Call,
    Communicator,
    VotedAllReduce,
    begin_unvoted,
    begin_voted,
    call_of,
)
from unisono.controller.transfers.transfer import Job, Pending, PendingVote, RemadeJob, VotedJob


def duplicate(comm: Communicator) -> Communicator:
    """Returns a new communicator of the same ranks. Collective."""
    part = comm.split(0, comm.rank)
    assert part is not None  # each rank passes color 0, so each belongs to the group
    return part


class CommunicatorTransfer:
    """Moves data over two communicators, one for decided jobs (all ranks are known to be ready) and
    one for voted jobs (the ranks first vote whether all are ready).
    """

    @staticmethod
    def over(comm: Communicator) -> CommunicatorTransfer:
        """Returns a transfer with new communicators for the ranks of `comm`. Collective."""
        return CommunicatorTransfer(duplicate(comm), duplicate(comm))

    def __init__(self, decided: Communicator, voted: Communicator) -> None:
        """Takes both communicators; `close` closes them."""
        self._decided = decided
        self._voted = voted

    def begin(self, job: Job) -> Pending:
        """Begins a job for which all ranks are ready."""
        return begin_unvoted(self._decided, job.operation, _call(self._decided, job))

    def prepare(self, job: Job) -> VotedJob:
        """Prepares a voted job. The ranks vote by one reduction of 8 bytes, which runs no Python
        code. A small all_reduce carries the vote instead.
        """
        if job.operation == "all_reduce":
            return VotedAllReduce(self._voted, job.arrays, job.op, carries_vote=True)
        return RemadeJob(self._begin_voted, job)

    def _begin_voted(self, job: Job | None) -> PendingVote:
        if job is None:
            return begin_voted(self._voted, "void call", None)
        return begin_voted(self._voted, job.operation, _call(self._voted, job))

    def close(self) -> None:
        """Closes both communicators."""
        self._voted.close()
        self._decided.close()


def _call(comm: Communicator, job: Job) -> Call:
    return call_of(comm, job.operation, job.arrays, op=job.op, root=job.root, lengths=job.lengths)

"""How a communicator of MPI is given back that was a group's own; MPI has some thousands of them.

Who leaves a group must not wait for the others, and what comes for a communicator that was freed
could be taken for a message of the next one that gets its number. So each rank that has left in
good order sends a last message to every other, and takes what comes until it has theirs: messages
of a rank do not overtake each other. To free it then is a matter of this rank alone in Open MPI and
MPICH.
"""

from __future__ import annotations

from unisono.transport.mpi_transport import LAST_TAG, MpiLink

_MOST_BYTES = 8192  # MPI brings so much at once; heads and news are shorter


class PendingRelease:
    """From the moment when this rank has left the group of `link`, and sends there no more."""

    def __init__(self, link: MpiLink) -> None:
        mpi, comm = link.mpi, link.comm
        self._link = link
        self._awaited = set(range(comm.size)) - {comm.rank}
        self._sends = [comm.Isend([b"", mpi.BYTE], peer, LAST_TAG) for peer in self._awaited]

    def over(self) -> bool:
        """Takes what has come; whether there is nothing left to be done. Does not wait."""
        mpi, comm = self._link.mpi, self._link.comm
        if mpi.Is_finalized():
            return True
        try:
            if not self._take():
                return True
            self._sends = [send for send in self._sends if not send.Test()]
            if self._awaited or self._sends:
                return False
            comm.Free()
        except mpi.Exception:
            pass  # it stays until MPI is finalised
        return True

    def _take(self) -> bool:
        """False: somebody sends what this rank should have received, so it is not given back."""
        mpi, comm = self._link.mpi, self._link.comm
        status = mpi.Status()
        while self._awaited and comm.Iprobe(mpi.ANY_SOURCE, mpi.ANY_TAG, status):
            size, peer, tag = status.Get_count(mpi.BYTE), status.Get_source(), status.Get_tag()
            if size > _MOST_BYTES:
                return False
            comm.Recv([bytearray(size), mpi.BYTE], peer, tag)
            if tag == LAST_TAG:
                self._awaited.discard(peer)
        return True

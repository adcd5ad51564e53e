"""Frees the MPI communicator of a group; MPI supports only some thousands of them.

A rank that leaves a group must not wait for the others. But MPI could deliver a message for a freed
communicator to the next communicator with the same number. So each rank that has left without a
failure sends a last message to every other rank, and receives messages until it has the last
message of each rank. Messages of one rank arrive in order. After that, in Open MPI and MPICH, a
rank frees the communicator without the others.
"""

from __future__ import annotations

from unisono.transport.mpi_transport import LAST_TAG, MpiLink

# MPI sends this length without waiting for a receive; heads and control messages are shorter
_MOST_BYTES = 8192


class PendingRelease:
    """The release of a link's communicator, after this rank has left the group and sends no more
    messages.
    """

    def __init__(self, link: MpiLink) -> None:
        mpi, comm = link.mpi, link.comm
        self._link = link
        self._awaited = set(range(comm.size)) - {comm.rank}
        self._sends = [comm.Isend([b"", mpi.BYTE], peer, LAST_TAG) for peer in self._awaited]

    def is_complete(self) -> bool:
        """Receives arrived messages, without a wait. Returns True if the release is complete."""
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
            pass  # the communicator stays until MPI is finalised
        return True

    def _take(self) -> bool:
        """Receives the messages that have arrived. Returns False if one of them is too long for a
        head or a control message: it is a payload that was not received, so nothing may be freed.
        """
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

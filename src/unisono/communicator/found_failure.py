"""The failure of a group: a question, and a failure that a rank has found elsewhere."""

from __future__ import annotations

from unisono.communicator.communicator import Communicator
from unisono.control import Fault
from unisono.errors import PeerLostError


def has_failed(comm: Communicator) -> bool:
    """Returns True if this rank knows of a failure of the group."""
    return comm._group.failure() is not None


def fail_group(comm: Communicator, error: Exception) -> None:
    """Ends all pending calls on all ranks. If the error reports a lost rank, other ranks get the
    same error, which they may find later themselves. Otherwise they get `AbortedError` with its
    text.
    """
    if isinstance(error, PeerLostError):
        comm._group.fail(Fault.PEER_LOST, str(error))
    else:
        comm.abort(f"{type(error).__name__}: {error}")

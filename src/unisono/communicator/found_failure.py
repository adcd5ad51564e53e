"""The failure of a group: a question, and a failure that a rank has found elsewhere."""

from __future__ import annotations

from unisono.communicator.communicator import Communicator
from unisono.errors import AbortedError, CollectiveTimeoutError, PeerLostError
from unisono.rank_connections import Fault

_FAULTS: dict[type[Exception], Fault] = {
    PeerLostError: Fault.PEER_LOST,
    CollectiveTimeoutError: Fault.TIMEOUT,
    AbortedError: Fault.ABORTED,
}


def has_failed(comm: Communicator) -> bool:
    """Returns True if this rank knows of a failure of the group."""
    return comm._group.failure() is not None


def fail_group(comm: Communicator, error: Exception) -> None:
    """Ends all pending calls on all ranks. If the error reports a lost rank, a timeout or an abort,
    other ranks get the same error. Otherwise they get `AbortedError` with its type and text.
    """
    fault = _FAULTS.get(type(error))
    if fault is None:
        comm.abort(f"{type(error).__name__}: {error}")
    else:
        comm._group.fail(fault, str(error))

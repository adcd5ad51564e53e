"""The number in the job of a rank that died."""

from __future__ import annotations

from torch import distributed as dist

from unisono.errors import PeerLostError, UnisonoError
from unisono.torch_backend import communicator_of

_WAIT_S = 1.0


def named_in_job(error: PeerLostError) -> PeerLostError:
    """Returns an error that names the lost rank by its number in torch's default group.

    The error of an axis has the rank's number on that axis. The default group has failed too, or
    fails as soon as it is used, since the rank is one of its own. Returns `error` if the rank left
    the axis and is alive.
    """
    group = dist.group.WORLD
    comm = communicator_of(group) if group is not None else None
    if comm is None:
        return error
    try:
        comm.barrier(async_op=True).wait(_WAIT_S)
    except PeerLostError as found:
        return found
    except (UnisonoError, TimeoutError):
        return error
    return error

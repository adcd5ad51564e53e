"""The number of a lost rank in torch's default group."""

from __future__ import annotations

import contextlib

from torch import distributed as dist

from unisono.errors import PeerLostError, UnisonoError
from unisono.parallel.run.error_causes import with_causes
from unisono.torch_backend import communicator_of

_WAIT_S = 1.0


def lost_rank_error(error: BaseException) -> PeerLostError | None:
    """Returns an error that names a lost rank by its number in torch's default group.

    Returns None if `error` has another cause. An error of an axis's group has the rank's number in
    that group, and torch's pipelines wrap this error in their own error.
    """
    for found in with_causes(error):
        if isinstance(found, PeerLostError):
            return _of_default_group() or found
    return None


def _of_default_group() -> PeerLostError | None:
    """Returns the default group's error about a lost rank; None if the default group still works.

    The default group fails at its next use if it contains the lost rank. It still works if the rank
    only left the group of an axis.
    """
    group = dist.group.WORLD
    comm = communicator_of(group) if group is not None else None
    if comm is None:
        return None
    with contextlib.suppress(UnisonoError, TimeoutError):
        try:
            comm.barrier(async_op=True).wait(_WAIT_S)
        except PeerLostError as found:
            return found
    return None

"""The ranks of one host among those that were found come to share a segment.

Sharing it is the proof that they are on one host: the descriptor is handed over a local socket, the
kernel vouches for the user at the other end, and the nonce is read back out of the memory.
"""

from __future__ import annotations

from unisono.bootstrap.group_config import GroupConfig, JoinedGroup
from unisono.bootstrap.peer_exchange import WorldFacts
from unisono.bootstrap.shared_segment import join_segment
from unisono.errors import RendezvousError
from unisono.types import SingleCopy


def join_host_group(
    found: WorldFacts,
    rank: int,
    *,
    timeout_s: float,
    single_copy: SingleCopy = SingleCopy.AUTO,
) -> JoinedGroup:
    """The group of this rank's host; in it a rank has its place in `found.host_of(rank)`.

    Segments of all hosts have one shape, `found.shape`. Raises `RendezvousError` if the ranks that
    look as if they were on this host cannot share memory.
    """
    local = found.host_of(rank)
    meeting = GroupConfig(
        rank=local.index(rank),
        size=len(local),
        rendezvous=f"world {found.world.hex()} of host {found.contacts[rank].host}",
        timeout_s=timeout_s,
        staging_bytes=0,
        shape=found.shape,
        names=local,
        word=found.word,
        single_copy=single_copy,
    )
    try:
        return join_segment(meeting)
    except RendezvousError as error:
        raise RendezvousError(
            f"ranks {list(local)} look as if they were on one host, but rank {rank} cannot share "
            f"memory with them: {error} (if they are on several hosts after all, give those "
            "different UNISONO_HOST_ID)"
        ) from error

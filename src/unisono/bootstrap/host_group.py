"""Forms the group of one host's ranks. They share a segment, which proves that they are on one
host.

A local socket passes the segment's descriptor, the kernel confirms the peer's user, and each rank
reads the nonce back from the memory.
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
    """Forms the group of all ranks of this rank's host, in the order of `found.host_of(rank)`.

    The segments of all hosts have the same shape, `found.shape`. Raises `RendezvousError` if ranks
    with equal host keys cannot share memory.
    """
    local = found.host_of(rank)
    group_config = GroupConfig(
        rank=local.index(rank),
        size=len(local),
        rendezvous=f"world {found.world.hex()} of host {found.peer_infos[rank].host}",
        timeout_s=timeout_s,
        staging_bytes=0,
        shape=found.shape,
        names=local,
        rank0_data=found.rank0_data,
        single_copy=single_copy,
    )
    try:
        return join_segment(group_config)
    except RendezvousError as error:
        raise RendezvousError(
            f"ranks {list(local)} have equal host keys, but rank {rank} cannot share memory with "
            f"them: {error} (if the ranks are on several hosts, give each host a different "
            "UNISONO_HOST_ID)"
        ) from error

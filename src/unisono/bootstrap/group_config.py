"""The configuration with which a rank joins a group, and the group that results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unisono.bootstrap.group_network import GroupNetwork
from unisono.native import Group, in_progress_thread, segment_shape, usable_cores
from unisono.types import SingleCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingShape:
    """Staging memory of each rank: `depth` blocks in flight, and the bytes per block."""

    depth: int
    buffer_bytes: int


def shape_for(ranks: int, cores: int, staging_bytes: int) -> StagingShape:
    """Chooses the shape for `ranks` ranks of one host, which share `staging_bytes`."""
    depth, buffer_bytes = segment_shape(ranks, cores, staging_bytes)
    return StagingShape(depth=depth, buffer_bytes=buffer_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """One rank's parameters for joining a group.

    `rendezvous` is equal on all ranks of the group, and no other group uses it.
    """

    rank: int
    size: int
    rendezvous: str
    timeout_s: float
    staging_bytes: int
    rank0_data: bytes = b""
    """Data that rank 0 sends to all other ranks."""
    single_copy: SingleCopy = SingleCopy.AUTO
    """Use of single copy if ranks can read each other's memory. Rank 0's value applies to all
    ranks.
    """
    shape: StagingShape | None = None
    """Shape of the staging memory. None: chosen from the number of ranks, this host and
    `staging_bytes`."""
    heaps: bool = True
    """Permission for shared heaps. False: a host of the group cannot create them."""
    names: Sequence[int] = ()
    """Rank numbers that error texts show for this group's ranks, if the group is part of a larger
    group. Empty: error texts show 0 to `size` - 1.
    """
    watch: Callable[[], None] | None = None
    """Function that this rank calls every 20 ms while it waits for others. The function raises
    `RendezvousError` when waiting has become useless."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}: expected a rank from 0 to size-1")
        if self.names and len(self.names) != self.size:
            raise ValueError(f"{len(self.names)} names for {self.size} ranks: expected one each")

    @property
    def label(self) -> str:
        """Returns this rank's name for error texts."""
        return f"rank {self.name(self.rank)} of {self.size}"

    def name(self, rank: int) -> int:
        """Returns the number that error texts show for a rank."""
        return self.names[rank] if self.names and 0 <= rank < self.size else rank


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedGroup:
    """A formed group, rank 0's data, and the group's network if the group spans hosts.

    `nonce` identifies the group; no other group has the same nonce.
    """

    group: Group
    nonce: bytes
    rank0_data: bytes
    network: GroupNetwork | None = None
    single_copy: SingleCopy = SingleCopy.NEVER
    """Use of single copy. It is NEVER if some rank cannot read another rank's memory."""
    timeout_s: float = 0.0
    """Time limit in seconds for `close`: ranks of other hosts may need this rank's last data."""

    def close(self) -> None:
        """Leaves the group without a failure and frees its memory.

        The garbage collector may call this in one of the group's own threads, which cannot wait for
        its own end. In that case another thread closes the group.
        """
        if in_progress_thread():
            threading.Thread(target=self._close, name="unisono-close").start()
        else:
            self._close()

    def _close(self) -> None:
        try:
            self.group.close(self.timeout_s)
        finally:
            if self.network is not None:
                self.network.leave()
            self.group.give_back()  # last, since ranks of other hosts may still read this memory


OpenGroup = Callable[[int, int, bytes], Group]
"""Makes a rank's group from the segment's descriptor, the rank and the nonce. The group closes the
descriptor."""


def open_group(fd: int, rank: int, nonce: bytes) -> Group:
    """Makes the group of a rank whose peers are all on this host."""
    return Group(fd, rank, nonce, usable_cores())

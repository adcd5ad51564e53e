"""A meeting of ranks that form a group, and what each of them has of it then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unisono.bootstrap.group_network import GroupNetwork
from unisono.native import Group, in_progress_thread, segment_shape, usable_cores
from unisono.types import SingleCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingShape:
    """Of the staging of each rank: blocks in flight, and bytes of each."""

    depth: int
    buffer_bytes: int


def shape_for(ranks: int, cores: int, staging_bytes: int) -> StagingShape:
    """Chooses for so many ranks of one host, which share `staging_bytes`."""
    depth, buffer_bytes = segment_shape(ranks, cores, staging_bytes)
    return StagingShape(depth=depth, buffer_bytes=buffer_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """A rank's view of it: `rendezvous` is equal on all ranks and the group's own."""

    rank: int
    size: int
    rendezvous: str
    timeout_s: float
    staging_bytes: int
    word: bytes = b""
    """What rank 0 tells the others."""
    single_copy: SingleCopy = SingleCopy.AUTO
    """Whether they are to read each other's memory, if they can; rank 0's counts."""
    shape: StagingShape | None = None
    """Of the segment. None: what suits these ranks, this host and `staging_bytes`."""
    names: Sequence[int] = ()
    """What the ranks are called in errors, if they are part of a larger group."""
    watch: Callable[[], None] | None = None
    """Called every 20 ms while this rank waits for others to come; raises `RendezvousError` when
    there is no use in it."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}: ranks are counted from 0 to size-1")
        if self.names and len(self.names) != self.size:
            raise ValueError(f"{len(self.names)} names for {self.size} ranks")

    @property
    def who(self) -> str:
        """This rank, in errors."""
        return f"rank {self.name(self.rank)} of {self.size}"

    def name(self, rank: int) -> int:
        """What a rank is called in errors."""
        return self.names[rank] if self.names and 0 <= rank < self.size else rank


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedGroup:
    """The group, its nonce (a name that no other group has), and the word of rank 0; and what it
    has of the network, if it spans hosts."""

    group: Group
    nonce: bytes
    word: bytes
    span: GroupNetwork | None = None
    single_copy: SingleCopy = SingleCopy.NEVER
    """Whether all ranks are to read each other's memory, and can."""
    timeout_s: float = 0.0
    """Seconds in which ranks of other hosts may take what this one sent before it closes."""

    def close(self) -> None:
        """Leaves the group in good order, and gives back its memory.

        The garbage collector may call this in a thread of the group's own, which cannot wait for
        its own end: then another thread does it.
        """
        if in_progress_thread():
            threading.Thread(target=self._close, name="unisono-close").start()
        else:
            self._close()

    def _close(self) -> None:
        try:
            self.group.close(self.timeout_s)
        finally:
            if self.span is not None:
                self.span.leave()
            self.group.give_back()  # last: ranks of other hosts asked for what is in it


OpenGroup = Callable[[int, int, bytes], Group]
"""Makes the group of a rank: (descriptor of the segment, which the group closes; rank; nonce)."""


def open_group(fd: int, rank: int, nonce: bytes) -> Group:
    """The group of a rank whose peers are all on this host."""
    return Group(fd, rank, nonce, usable_cores())

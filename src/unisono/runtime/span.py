"""What a group that spans hosts has of the network that it lives in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from unisono.native import Group
    from unisono.runtime.meeting import Meeting, Met
    from unisono.runtime.succession import Succession, Ties

Hosts: TypeAlias = tuple[tuple[int, ...], ...]
"""The ranks of each host."""


class Wire(IntEnum):
    """What ranks of different hosts have between them; as in `csrc/group.h`."""

    COLLECTIVES = 0
    P2P = 1


class Roads(Protocol):
    """The network, as a group needs it."""

    def form(self, meeting: Meeting, members: Sequence[int]) -> Met:
        """A group of these ranks of the world."""

    def reach(self, name: bytes, peers: Iterable[int], wire: Wire) -> None:
        """Connects to ranks of the group of this name. Returns at once."""

    def leave(self, name: bytes) -> None:
        """After the group was closed here."""

    def ties(
        self, name: bytes, members: Sequence[int], group: Group, succession: Succession
    ) -> Ties:
        """What is left between the ranks of the group of this name when it has failed. Raises
        `UnsupportedError` if nothing is."""


class Span:
    """The hosts of a group, and its connections. `members` are its ranks in the world."""

    def __init__(
        self, roads: Roads, name: bytes, rank: int, members: tuple[int, ...], hosts: Hosts
    ) -> None:
        self.roads = roads
        self.members = members
        self.hosts = hosts
        self._name = name
        here = next(host for host in hosts if rank in host)
        self._reached = {wire: set(here) for wire in Wire}

    def reach(self, peers: Iterable[int], wire: Wire) -> None:
        """Sees to it that this rank is, or soon will be, connected to these of its peers."""
        new = set(peers) - self._reached[wire]
        if new:
            self.roads.reach(self._name, sorted(new), wire)
            self._reached[wire] |= new  # last: a signal handler may raise before it is done

    def ties(self, group: Group, succession: Succession) -> Ties:
        """What is left between its ranks when it has failed."""
        return self.roads.ties(self._name, self.members, group, succession)

    def leave(self) -> None:
        """After the group was closed."""
        self.roads.leave(self._name)

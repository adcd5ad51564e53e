"""What a group that spans hosts has of the network that it lives in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from unisono.bootstrap.group_config import GroupConfig, JoinedGroup
    from unisono.control import ConnectionManager

Hosts: TypeAlias = tuple[tuple[int, ...], ...]
"""The ranks of each host."""


class TransportKind(IntEnum):
    """What ranks of different hosts have between them; as in `csrc/execution/group.h`."""

    COLLECTIVES = 0
    P2P = 1


class Network(Protocol):
    """The network, as a group needs it."""

    def form(self, meeting: GroupConfig, members: Sequence[int]) -> JoinedGroup:
        """A group of these ranks of the world."""

    def reach(self, name: bytes, peers: Iterable[int], transport: TransportKind) -> None:
        """Connects to ranks of the group of this name. Returns at once."""

    def leave(self, name: bytes) -> None:
        """After the group was closed here."""

    def connections(self) -> ConnectionManager:
        """The connections by which ranks agree after a failure. Raises `UnsupportedError` if the
        network does not outlive one."""

    def form_recovered(self, config: GroupConfig, members: Sequence[int]) -> JoinedGroup:
        """The group that succeeds a failed one, with a control group of its own."""


class GroupNetwork:
    """The hosts of a group, and its connections. `members` are its ranks in the world."""

    def __init__(
        self, network: Network, name: bytes, rank: int, members: tuple[int, ...], hosts: Hosts
    ) -> None:
        self.network = network
        self.name = name
        self.members = members
        self.hosts = hosts
        here = next(host for host in hosts if rank in host)
        self._reached = {transport: set(here) for transport in TransportKind}

    def reach(self, peers: Iterable[int], transport: TransportKind) -> None:
        """Sees to it that this rank is, or soon will be, connected to these of its peers."""
        new = set(peers) - self._reached[transport]
        if new:
            self.network.reach(self.name, sorted(new), transport)
            self._reached[transport] |= new  # last: a signal handler may raise before it is done

    def leave(self) -> None:
        """After the group was closed."""
        self.network.leave(self.name)


def ranks_by_host(host_of: Sequence[int]) -> Hosts:
    """Groups ranks by host, given the host of each rank. Hosts keep the order of their first ranks.

    >>> ranks_by_host([7, 3, 7])
    ((0, 2), (1,))
    """
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(host_of):
        ranks.setdefault(host, []).append(rank)
    return tuple(map(tuple, ranks.values()))

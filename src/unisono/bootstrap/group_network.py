"""The network between the hosts of a world, and the connections that one group uses in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from unisono.bootstrap.group_config import GroupConfig, JoinedGroup
    from unisono.rank_connections import ConnectionManager

Hosts: TypeAlias = tuple[tuple[int, ...], ...]
"""The ranks of each host."""


class TransportKind(IntEnum):
    """Kinds of connection between ranks of different hosts, with the values of
    `csrc/execution/group.h`.
    """

    COLLECTIVES = 0
    P2P = 1


class Network(Protocol):
    """Interface of a world's network for its groups."""

    def form(self, group_config: GroupConfig, members: Sequence[int]) -> JoinedGroup:
        """Forms a group of these ranks of the world."""

    def reach(self, name: bytes, peers: Iterable[int], transport: TransportKind) -> None:
        """Connects to these ranks of the group `name`. Returns at once."""

    def leave(self, name: bytes) -> None:
        """Releases the group's connections, after the caller has closed the group on this rank."""

    def connections(self) -> ConnectionManager:
        """Returns the connection manager by which ranks agree after a failure.

        Raises `UnsupportedError` if the network cannot be used after a rank's failure.
        """

    def form_recovered(self, config: GroupConfig, members: Sequence[int]) -> JoinedGroup:
        """Forms the group that replaces a failed group, and a new control group for its ranks."""


class GroupNetwork:
    """Hosts and connections of one group. `members` are the world ranks of the group's ranks."""

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
        """Ensures that connections to these peers exist or are being opened."""
        new = set(peers) - self._reached[transport]
        if new:
            self.network.reach(self.name, sorted(new), transport)
            self._reached[transport] |= (
                new  # only now, since a signal handler may interrupt `reach` by an error
            )

    def leave(self) -> None:
        """Releases the group's connections, after the group was closed."""
        self.network.leave(self.name)


def ranks_by_host(host_of: Sequence[int]) -> Hosts:
    """Groups ranks by host, given the host of each rank. Hosts are in the order of their first
    ranks.

    >>> ranks_by_host([7, 3, 7])
    ((0, 2), (1,))
    """
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(host_of):
        ranks.setdefault(host, []).append(rank)
    return tuple(map(tuple, ranks.values()))

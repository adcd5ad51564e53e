"""Groups whose ranks on different hosts communicate by TCP: one network per world.

A world's ranks find each other through a bootstrap store and join one network, which all groups of
the world share. A group's ranks on one host share a memory segment. Ranks of different hosts
connect when a call first needs it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from unisono.bootstrap.group_config import GroupConfig, JoinedGroup
from unisono.bootstrap.group_network import GroupNetwork, Hosts, WireKind, ranks_by_host
from unisono.bootstrap.host_group import join_host_group
from unisono.bootstrap.peer_exchange import RankFacts, WorldFacts, exchange_facts, this_host
from unisono.bootstrap.shared_segment import join_segment
from unisono.bootstrap.store import BootstrapStore
from unisono.config import Settings
from unisono.control import ConnectionManager
from unisono.errors import AbortedError
from unisono.native import Group, usable_cores
from unisono.transport import Security, available_interfaces, choose_interfaces
from unisono.types import SingleCopy

_NAME_BYTES = 16


class TcpNetwork:
    """A `Network` over TCP; it exists while this rank is in one of the world's groups.

    `control_group`: the ranks that inform each other of losses; None means the world. `entered`
    holds the groups of all control groups, which share the connection manager.
    """

    def __init__(
        self,
        porter: ConnectionManager,
        found: WorldFacts,
        circle: bytes | None = None,
        entered: set[bytes] | None = None,
    ) -> None:
        self._porter, self._found, self._circle = porter, found, circle
        self._entered = set[bytes]() if entered is None else entered

    def form(self, meeting: GroupConfig, members: Sequence[int]) -> JoinedGroup:
        """Forms a group of these ranks of the world, in this order; all of them call this.

        A group on one host uses shared memory only. Raises `RendezvousError` if ranks of this host
        are missing. The first call waits for ranks of other hosts.
        """
        hosts = self._hosts(members)
        if len(hosts) == 1:
            return join_segment(meeting)
        name = self._name(meeting)
        return self._enter(name, meeting, members, hosts, self._meet_here(name, meeting, hosts))

    def reach(self, name: bytes, peers: Iterable[int], wire: WireKind) -> None:
        """Connects to ranks of a group."""
        self._porter.reach(name, peers, wire)

    def leave(self, name: bytes) -> None:
        """Leaves a group; leaving the last group closes the network."""
        with contextlib.suppress(AbortedError):  # in a forked child: the groups are the parent's
            self._porter.leave(name)
        self._entered.discard(name)
        if not self._entered:
            self._porter.close()

    def connections(self) -> ConnectionManager:
        """Returns the connections by which ranks agree after a failure."""
        return self._porter

    def form_recovered(self, meeting: GroupConfig, members: Sequence[int]) -> JoinedGroup:
        """Forms a group that replaces a failed one. Its ranks wait for each other in a control
        group of their own, in which the first rank sends its data to the others."""
        hosts = self._hosts(members)
        if len(hosts) == 1:
            return join_segment(meeting)
        name = self._name(meeting)
        heir = TcpNetwork(self._porter, self._found, name, self._entered)
        group = self._meet_here(name, meeting, hosts)
        try:
            word = self._porter.rally(
                name, members, meeting.word, meeting.timeout_s, meeting.watch or _nothing
            )
        except BaseException:
            group.close()
            group.give_back()
            raise
        return heir._enter(name, replace(meeting, word=word), members, hosts, group)

    def _meet_here(self, name: bytes, meeting: GroupConfig, hosts: Hosts) -> Group:
        """Joins the segment that this host's ranks share."""
        here = next(host for host in hosts if meeting.rank in host)
        local = GroupConfig(
            rank=here.index(meeting.rank),
            size=len(here),
            rendezvous=f"{name.hex()} of host {hosts.index(here)}",
            timeout_s=meeting.timeout_s,
            staging_bytes=meeting.staging_bytes,
            shape=self._found.shape,
            names=here,
            watch=meeting.watch,
            single_copy=SingleCopy.NEVER,  # in a group of several hosts
        )

        def open_group(fd: int, _: int, nonce: bytes) -> Group:
            return Group.of_hosts(fd, meeting.rank, meeting.size, here, nonce, usable_cores())

        return join_segment(local, open_group).group

    def _enter(
        self, name: bytes, meeting: GroupConfig, members: Sequence[int], hosts: Hosts, group: Group
    ) -> JoinedGroup:
        self._entered.add(name)
        self._porter.enter(name, members, meeting.rank, group, self._circle)
        span = GroupNetwork(self, name, meeting.rank, tuple(members), hosts)
        return JoinedGroup(
            group=group, nonce=name, word=meeting.word, span=span, timeout_s=meeting.timeout_s
        )

    def _hosts(self, members: Sequence[int]) -> Hosts:
        return ranks_by_host([self._found.contacts[member].host for member in members])

    def _name(self, meeting: GroupConfig) -> bytes:
        return hashlib.sha256(self._found.world + meeting.rendezvous.encode()).digest()[
            :_NAME_BYTES
        ]


def _nothing() -> None:
    """Watches nothing."""


def join_by_tcp(
    board: BootstrapStore, meeting: GroupConfig, settings: Settings, security: Security
) -> JoinedGroup:
    """Joins the world whose ranks find each other through `store`; returns when all have joined.

    Raises `RendezvousError` if a rank is missing at the timeout, `AuthenticationError` if this rank
    is rejected.
    """
    found_here = available_interfaces(settings.ip_version)
    interfaces = choose_interfaces(settings.interface, found_here, rails=settings.rails)
    porter = ConnectionManager(
        addresses=[interface.address for interface in interfaces],
        ports=settings.ports,
        streams=settings.streams,
        peer_timeout_s=settings.peer_timeout_s,
        security=security,
    )
    try:
        arrival = RankFacts(
            rank=meeting.rank,
            size=meeting.size,
            timeout_s=meeting.timeout_s,
            addresses=porter.bound,
            staging_bytes=meeting.staging_bytes,
            host=this_host(settings.host_id),
            word=meeting.word,
            tls=security.tls,
        )
        found = exchange_facts(board, arrival)
        if len(found.hosts) == 1:
            porter.close()
            return join_host_group(
                found,
                meeting.rank,
                timeout_s=meeting.timeout_s,
                single_copy=meeting.single_copy,
            )
        return _join(porter, found, meeting)
    except BaseException:
        porter.close()
        raise


def _join(porter: ConnectionManager, found: WorldFacts, meeting: GroupConfig) -> JoinedGroup:
    porter.join(
        world=found.world,
        secret=found.secret,
        rank=meeting.rank,
        contacts=found.contacts,
        timeout_s=meeting.timeout_s,
    )
    whole = GroupConfig(
        rank=meeting.rank,
        size=meeting.size,
        rendezvous="world",
        timeout_s=meeting.timeout_s,
        staging_bytes=meeting.staging_bytes,
        word=found.word,
    )
    return TcpNetwork(porter, found).form(whole, range(meeting.size))

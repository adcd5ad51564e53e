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
from unisono.bootstrap.group_network import GroupNetwork, Hosts, TransportKind, ranks_by_host
from unisono.bootstrap.host_group import join_host_group
from unisono.bootstrap.peer_exchange import RankFacts, WorldFacts, exchange_facts, this_host
from unisono.bootstrap.shared_segment import join_segment
from unisono.bootstrap.store import BootstrapStore
from unisono.config import Settings
from unisono.errors import AbortedError
from unisono.native import Group, usable_cores
from unisono.rank_connections import ConnectionManager
from unisono.transport import Security, available_interfaces, choose_interfaces
from unisono.types import SingleCopy

_NAME_BYTES = 16


class TcpNetwork:
    """A `Network` over TCP. It is closed when this rank has left all groups of the world.

    `control_group` names the control group, whose ranks inform each other of lost ranks; None means
    the world's. `entered` holds the groups of all control groups, which share the connection
    manager.
    """

    def __init__(
        self,
        manager: ConnectionManager,
        found: WorldFacts,
        control_group: bytes | None = None,
        entered: set[bytes] | None = None,
    ) -> None:
        self._manager, self._found, self._control_group = manager, found, control_group
        self._entered = set[bytes]() if entered is None else entered

    def form(self, group_config: GroupConfig, members: Sequence[int]) -> JoinedGroup:
        """Forms a group of these ranks of the world, in this order; all of them must call this.

        A group on one host uses shared memory only. Raises `RendezvousError` if ranks of this host
        are missing. The first call waits for ranks of other hosts.
        """
        hosts = self._hosts(members)
        if len(hosts) == 1:
            return join_segment(group_config)
        name = self._name(group_config)
        return self._enter(
            name, group_config, members, hosts, self._join_local_segment(name, group_config, hosts)
        )

    def reach(self, name: bytes, peers: Iterable[int], transport: TransportKind) -> None:
        """Connects to ranks of a group."""
        self._manager.reach(name, peers, transport)

    def leave(self, name: bytes) -> None:
        """Leaves a group; leaving the last group closes the network."""
        with contextlib.suppress(AbortedError):  # raised in a forked child
            self._manager.leave(name)
        self._entered.discard(name)
        if not self._entered:
            self._manager.close()

    def connections(self) -> ConnectionManager:
        """Returns the connection manager by which ranks agree after a failure."""
        return self._manager

    def form_recovered(self, group_config: GroupConfig, members: Sequence[int]) -> JoinedGroup:
        """Forms a group that replaces a failed group. Its ranks form a new control group, in which
        they wait for each other and the first rank sends its data to the others.
        """
        hosts = self._hosts(members)
        if len(hosts) == 1:
            return join_segment(group_config)
        name = self._name(group_config)
        recovered_network = TcpNetwork(self._manager, self._found, name, self._entered)
        group = self._join_local_segment(name, group_config, hosts)
        try:
            rank0_data = self._manager.form_control_group(
                name,
                members,
                group_config.rank0_data,
                group_config.timeout_s,
                group_config.watch or _no_watch,
            )
        except BaseException:
            group.close()
            group.give_back()
            raise
        return recovered_network._enter(
            name, replace(group_config, rank0_data=rank0_data), members, hosts, group
        )

    def _join_local_segment(self, name: bytes, group_config: GroupConfig, hosts: Hosts) -> Group:
        """Joins the segment that this host's ranks share."""
        here = next(host for host in hosts if group_config.rank in host)
        local = GroupConfig(
            rank=here.index(group_config.rank),
            size=len(here),
            rendezvous=f"{name.hex()} of host {hosts.index(here)}",
            timeout_s=group_config.timeout_s,
            staging_bytes=group_config.staging_bytes,
            shape=self._found.shape,
            heaps=self._found.heaps,
            names=here,
            watch=group_config.watch,
            single_copy=SingleCopy.NEVER,  # since the group has several hosts
        )

        def open_group(fd: int, _: int, nonce: bytes) -> Group:
            return Group.of_hosts(
                fd, group_config.rank, group_config.size, here, nonce, usable_cores()
            )

        return join_segment(local, open_group).group

    def _enter(
        self,
        name: bytes,
        group_config: GroupConfig,
        members: Sequence[int],
        hosts: Hosts,
        group: Group,
    ) -> JoinedGroup:
        self._entered.add(name)
        self._manager.enter(name, members, group_config.rank, group, self._control_group)
        network = GroupNetwork(self, name, group_config.rank, tuple(members), hosts)
        return JoinedGroup(
            group=group,
            nonce=name,
            rank0_data=group_config.rank0_data,
            network=network,
            timeout_s=group_config.timeout_s,
        )

    def _hosts(self, members: Sequence[int]) -> Hosts:
        return ranks_by_host([self._found.peer_infos[member].host for member in members])

    def _name(self, group_config: GroupConfig) -> bytes:
        return hashlib.sha256(self._found.world + group_config.rendezvous.encode()).digest()[
            :_NAME_BYTES
        ]


def _no_watch() -> None:
    """Does nothing. Used as `watch` if nothing must be checked while a rank waits for others."""


def join_by_tcp(
    bootstrap_store: BootstrapStore,
    group_config: GroupConfig,
    settings: Settings,
    security: Security,
) -> JoinedGroup:
    """Joins the world whose ranks find each other through `bootstrap_store`; returns when all have
    joined.

    Raises `RendezvousError` if a rank is missing at the timeout, `AuthenticationError` if this rank
    is rejected.
    """
    found_here = available_interfaces(settings.ip_version)
    interfaces = choose_interfaces(settings.interface, found_here, rails=settings.rails)
    manager = ConnectionManager(
        addresses=[interface.address for interface in interfaces],
        ports=settings.ports,
        streams=settings.streams,
        peer_timeout_s=settings.peer_timeout_s,
        security=security,
    )
    try:
        rank_facts = _facts(group_config, settings, security, manager)
        found = exchange_facts(bootstrap_store, rank_facts)
        if len(found.hosts) == 1:
            manager.close()
            return join_host_group(
                found,
                group_config.rank,
                timeout_s=group_config.timeout_s,
                single_copy=group_config.single_copy,
            )
        return _join(manager, found, group_config)
    except BaseException:
        manager.close()
        raise


def _facts(
    group_config: GroupConfig, settings: Settings, security: Security, manager: ConnectionManager
) -> RankFacts:
    """Returns the facts that this rank sends to the other ranks."""
    return RankFacts(
        rank=group_config.rank,
        size=group_config.size,
        timeout_s=group_config.timeout_s,
        addresses=manager.bound,
        staging_bytes=group_config.staging_bytes,
        host=this_host(settings.host_id),
        rank0_data=group_config.rank0_data,
        tls=security.tls,
    )


def _join(manager: ConnectionManager, found: WorldFacts, group_config: GroupConfig) -> JoinedGroup:
    manager.join(
        world=found.world,
        secret=found.secret,
        rank=group_config.rank,
        peer_infos=found.peer_infos,
        timeout_s=group_config.timeout_s,
    )
    world_group_config = GroupConfig(
        rank=group_config.rank,
        size=group_config.size,
        rendezvous="world",
        timeout_s=group_config.timeout_s,
        staging_bytes=group_config.staging_bytes,
        rank0_data=found.rank0_data,
    )
    return TcpNetwork(manager, found).form(world_group_config, range(group_config.size))

"""Groups whose ranks on different hosts communicate by MPI."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from unisono.bootstrap.group_config import GroupConfig, JoinedGroup, OpenGroup
from unisono.bootstrap.group_network import GroupNetwork, Hosts, TransportKind, ranks_by_host
from unisono.bootstrap.host_group import join_host_group
from unisono.bootstrap.mpi_store import MpiStore
from unisono.bootstrap.peer_exchange import RankFacts, WorldFacts, exchange_facts, this_host
from unisono.bootstrap.shared_segment import join_segment
from unisono.config import Settings
from unisono.errors import RendezvousError, UnsupportedError
from unisono.native import Group, usable_cores
from unisono.rank_connections import MpiWatch
from unisono.transport import MpiLink, PendingRelease
from unisono.types import SingleCopy

_NAME_BYTES = 16


def open_mpi_group(
    link: MpiLink, group_config: GroupConfig, here: Sequence[int], open_group: OpenGroup
) -> tuple[Group, MpiWatch]:
    """Makes the group of `link`'s ranks. Those on this host, `here`, share a segment.

    `group_config` configures the ranks of this host; `open_group` makes the group. Returns the
    group and the watcher of its peers on other hosts. Raises `RendezvousError`.
    """
    group = join_segment(group_config, open_group).group
    away = [rank for rank in range(link.comm.size) if rank not in here]
    return group, MpiWatch(link, group, away)


@dataclass(slots=True, kw_only=True)
class _EnteredGroup:
    """MPI objects of a group that this rank has entered."""

    link: MpiLink
    watch: MpiWatch
    group: Group


class MpiNetwork:
    """A `Network` over MPI.

    Once all ranks of a group have left it, this rank frees the group's MPI communicator the next
    time that it forms or leaves any group. The communicator of a failed group stays until MPI is
    finalised, because MPI may still move data for it.
    """

    def __init__(self, link: MpiLink, found: WorldFacts) -> None:
        self._link = link
        self._found = found
        self._groups: dict[bytes, _EnteredGroup] = {}
        self._releases: deque[PendingRelease] = deque()
        self._pid = os.getpid()

    def form(self, group_config: GroupConfig, members: Sequence[int]) -> JoinedGroup:
        """Forms a group of these ranks of the world, in this order; all of them must call this.

        A group on one host uses shared memory only. Raises `RendezvousError` if ranks are missing.
        """
        hosts = self._hosts(members)
        if len(hosts) == 1:
            return join_segment(group_config)
        name = hashlib.sha256(self._found.world + group_config.rendezvous.encode()).digest()
        name = name[:_NAME_BYTES]
        here = next(host for host in hosts if group_config.rank in host)
        local = replace(
            group_config,
            rank=here.index(group_config.rank),
            size=len(here),
            rendezvous=f"{name.hex()} by MPI of host {hosts.index(here)}",
            rank0_data=b"",
            shape=self._found.shape,
            heaps=self._found.heaps,
            names=here,
            single_copy=SingleCopy.NEVER,
        )
        self._give_back()
        link = _part(self._link, members, group_config.timeout_s)

        def open_group(fd: int, _: int, nonce: bytes) -> Group:
            cores = usable_cores()
            return Group.of_hosts(
                fd, group_config.rank, len(members), here, nonce, cores, link.library
            )

        group, watch = open_mpi_group(link, local, here, open_group)
        self._groups[name] = _EnteredGroup(link=link, watch=watch, group=group)
        network = GroupNetwork(self, name, group_config.rank, tuple(members), hosts)
        return JoinedGroup(
            group=group,
            nonce=name,
            rank0_data=group_config.rank0_data,
            network=network,
            timeout_s=group_config.timeout_s,
        )

    def reach(self, name: bytes, peers: Iterable[int], transport: TransportKind) -> None:
        """Does nothing, since MPI connects ranks by itself."""

    def leave(self, name: bytes) -> None:
        """Leaves a closed group. Does nothing in a forked child, because the group is the
        parent's."""
        if os.getpid() != self._pid:
            return
        left = self._groups.pop(name)
        left.watch.close()
        if left.link.quiet and left.group.failure() is None:
            self._releases.append(PendingRelease(left.link))
        self._give_back()

    def connections(self) -> NoReturn:
        """Raises `UnsupportedError`: MPI does not survive a rank's failure."""
        raise UnsupportedError(
            "a communicator that uses MPI between hosts cannot shrink: MPI ends the whole job when "
            "a rank dies. Without UNISONO_WIRE=mpi, ranks of several hosts connect by TCP and can"
        )

    def form_recovered(self, config: GroupConfig, members: Sequence[int]) -> NoReturn:
        """Raises `UnsupportedError`: MPI does not survive a rank's failure."""
        self.connections()

    def _give_back(self) -> None:
        """Frees the MPI communicator of each group that all ranks of the group have left."""
        for _ in range(len(self._releases)):
            with contextlib.suppress(IndexError):  # another thread may empty the queue
                release = self._releases.popleft()
                if not release.is_complete():
                    self._releases.append(release)

    def _hosts(self, members: Sequence[int]) -> Hosts:
        return ranks_by_host([self._found.peer_infos[member].host for member in members])


def join_by_mpi(group_config: GroupConfig, settings: Settings) -> JoinedGroup:
    """Joins the world of all ranks that mpiexec started.

    Raises `RendezvousError` if a rank is missing at the timeout, `UnsupportedError` if no usable
    MPI is found.
    """
    bootstrap_store = MpiStore()
    rank_facts = RankFacts(
        rank=group_config.rank,
        size=group_config.size,
        timeout_s=group_config.timeout_s,
        addresses=(),
        staging_bytes=group_config.staging_bytes,
        host=this_host(settings.host_id),
        rank0_data=group_config.rank0_data,
    )
    found = exchange_facts(bootstrap_store, rank_facts, by_address=False)
    if len(found.hosts) == 1:
        return join_host_group(
            found,
            group_config.rank,
            timeout_s=group_config.timeout_s,
            single_copy=group_config.single_copy,
        )
    network = MpiNetwork(MpiLink(bootstrap_store.mpi, bootstrap_store.comm), found)
    world_group_config = replace(group_config, rendezvous="world", rank0_data=found.rank0_data)
    return network.form(world_group_config, range(group_config.size))


def _part(link: MpiLink, members: Sequence[int], timeout_s: float) -> MpiLink:
    """Makes the `MpiLink` of the group `members`, with an MPI communicator for this group only.

    All ranks of the group must call this. A separate thread calls MPI, because MPI waits for all
    members without a timeout.
    """
    made: list[MpiLink | Exception] = []

    def make() -> None:
        try:
            made.append(link.part(members))
        except link.mpi.Exception as error:
            made.append(error)

    maker = threading.Thread(target=make, daemon=True)
    maker.start()
    maker.join(timeout_s)
    if made and isinstance(made[0], MpiLink):
        return made[0]
    reason = f"MPI: {made[0]}" if made else f"not all joined: timeout after {timeout_s:g} s"
    raise RendezvousError(f"cannot form a group of world ranks {list(members)}: {reason}")

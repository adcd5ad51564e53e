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
from unisono.bootstrap.group_network import GroupNetwork, Hosts, WireKind, ranks_by_host
from unisono.bootstrap.host_group import join_host_group
from unisono.bootstrap.mpi_store import MpiStore
from unisono.bootstrap.peer_exchange import RankFacts, WorldFacts, exchange_facts, this_host
from unisono.bootstrap.shared_segment import join_segment
from unisono.config import Settings
from unisono.control import MpiWatch
from unisono.errors import RendezvousError, UnsupportedError
from unisono.native import Group, usable_cores
from unisono.transport import MpiLink, PendingRelease
from unisono.types import SingleCopy

_NAME_BYTES = 16


def open_mpi_group(
    link: MpiLink, meeting: GroupConfig, here: Sequence[int], open_group: OpenGroup
) -> tuple[Group, MpiWatch]:
    """Makes the group of `link`'s ranks; the ranks `here` are on this host and share a segment.

    `local` configures the ranks of this host; `open_group` makes the group. Returns the group and
    the watcher of its peers on other hosts. Raises `RendezvousError`.
    """
    group = join_segment(meeting, open_group).group
    away = [rank for rank in range(link.comm.size) if rank not in here]
    return group, MpiWatch(link, group, away)


@dataclass(slots=True, kw_only=True)
class _Entered:
    """MPI objects of a group that this rank has entered."""

    link: MpiLink
    watch: MpiWatch
    group: Group


class MpiNetwork:
    """A `Network` over MPI.

    A group's MPI communicator is freed after all its ranks have left, when this rank next forms or
    leaves a group. The communicator of a failed group stays until MPI is finalised, because MPI may
    still move data for it.
    """

    def __init__(self, link: MpiLink, found: WorldFacts) -> None:
        self._link = link
        self._found = found
        self._groups: dict[bytes, _Entered] = {}
        self._partings: deque[PendingRelease] = deque()
        self._pid = os.getpid()

    def form(self, meeting: GroupConfig, members: Sequence[int]) -> JoinedGroup:
        """Forms a group of these ranks of the world, in this order; all of them call this.

        A group on one host uses shared memory only. Raises `RendezvousError` if ranks are missing.
        """
        hosts = self._hosts(members)
        if len(hosts) == 1:
            return join_segment(meeting)
        name = hashlib.sha256(self._found.world + meeting.rendezvous.encode()).digest()
        name = name[:_NAME_BYTES]
        here = next(host for host in hosts if meeting.rank in host)
        local = replace(
            meeting,
            rank=here.index(meeting.rank),
            size=len(here),
            rendezvous=f"{name.hex()} by MPI of host {hosts.index(here)}",
            word=b"",
            shape=self._found.shape,
            names=here,
            single_copy=SingleCopy.NEVER,
        )
        self._give_back()
        link = _part(self._link, members, meeting.timeout_s)

        def open_group(fd: int, _: int, nonce: bytes) -> Group:
            cores = usable_cores()
            return Group.of_hosts(fd, meeting.rank, len(members), here, nonce, cores, link.carrier)

        group, watch = open_mpi_group(link, local, here, open_group)
        self._groups[name] = _Entered(link=link, watch=watch, group=group)
        span = GroupNetwork(self, name, meeting.rank, tuple(members), hosts)
        return JoinedGroup(
            group=group, nonce=name, word=meeting.word, span=span, timeout_s=meeting.timeout_s
        )

    def reach(self, name: bytes, peers: Iterable[int], wire: WireKind) -> None:
        """Does nothing: MPI connects by itself."""

    def leave(self, name: bytes) -> None:
        """Leaves a closed group. Does nothing in a forked child, because the group is the
        parent's."""
        if os.getpid() != self._pid:
            return
        left = self._groups.pop(name)
        left.watch.close()
        if left.link.quiet and left.group.failure() is None:
            self._partings.append(PendingRelease(left.link))
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
        """Frees the MPI communicators that all their ranks have left."""
        for _ in range(len(self._partings)):
            with contextlib.suppress(IndexError):  # another thread may empty the queue
                parting = self._partings.popleft()
                if not parting.over():
                    self._partings.append(parting)

    def _hosts(self, members: Sequence[int]) -> Hosts:
        return ranks_by_host([self._found.contacts[member].host for member in members])


def join_by_mpi(meeting: GroupConfig, settings: Settings) -> JoinedGroup:
    """Joins the world of all ranks that mpiexec started.

    Raises `RendezvousError` if a rank is missing at the timeout, `UnsupportedError` if no usable
    MPI is found.
    """
    board = MpiStore()
    arrival = RankFacts(
        rank=meeting.rank,
        size=meeting.size,
        timeout_s=meeting.timeout_s,
        addresses=(),
        staging_bytes=meeting.staging_bytes,
        host=this_host(settings.host_id),
        word=meeting.word,
    )
    found = exchange_facts(board, arrival, by_address=False)
    if len(found.hosts) == 1:
        return join_host_group(
            found,
            meeting.rank,
            timeout_s=meeting.timeout_s,
            single_copy=meeting.single_copy,
        )
    network = MpiNetwork(MpiLink(board.mpi, board.comm), found)
    whole = replace(meeting, rendezvous="world", word=found.word)
    return network.form(whole, range(meeting.size))


def _part(link: MpiLink, members: Sequence[int], timeout_s: float) -> MpiLink:
    """Splits off the link of `members`, all of which call this.

    Runs in a thread of its own, because MPI waits for all members without a timeout.
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
    reason = f"MPI: {made[0]}" if made else f"not all joined within {timeout_s:g} s (timeout)"
    raise RendezvousError(f"cannot form a group of world ranks {list(members)}: {reason}")

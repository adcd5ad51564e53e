"""The ranks of several hosts: one network a world, and the groups that span its hosts.

A world's ranks find each other at a board, and join one network, which every group that is made
within the world shares: ranks of a group that are on one host share a segment of memory, the others
are connected when a call first needs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from unisono.config import Settings
from unisono.links.ends import Contact
from unisono.links.interfaces import available, choose
from unisono.links.porter import Porter
from unisono.links.security import Security
from unisono.native import Group, usable_cores
from unisono.runtime.boards import Board
from unisono.runtime.finding import Arrival, Found, find, this_host
from unisono.runtime.forming import form
from unisono.runtime.rendezvous import Meeting, Met, Shape, meet
from unisono.runtime.span import Hosts, Span, Wire

_NAME_BYTES = 16


class Network:
    """A rank's way to all others of its world, as long as it is in one of the world's groups."""

    def __init__(self, porter: Porter, found: Found) -> None:
        self._porter = porter
        self._contacts: tuple[Contact, ...] = found.contacts
        self._shape: Shape = found.shape
        self._world = found.world
        self._groups = 0

    def form(self, meeting: Meeting, members: Sequence[int]) -> Met:
        """A group of these ranks of the world, in this order; all of them call this.

        On one host it is as if there were no others. Raises `RendezvousError` if ranks of this host
        do not come; those of other hosts are awaited by the first call.
        """
        hosts = _partition([self._contacts[member].host for member in members])
        if len(hosts) == 1:
            return meet(meeting)
        name = hashlib.sha256(self._world + meeting.rendezvous.encode()).digest()[:_NAME_BYTES]
        here = next(host for host in hosts if meeting.rank in host)
        local = Meeting(
            rank=here.index(meeting.rank),
            size=len(here),
            rendezvous=f"{name.hex()} of host {self._contacts[members[meeting.rank]].host}",
            timeout_s=meeting.timeout_s,
            staging_bytes=meeting.staging_bytes,
            shape=self._shape,
            names=here,
        )

        def open_group(fd: int, _: int, nonce: bytes) -> Group:
            return Group.of_hosts(fd, meeting.rank, len(members), here, nonce, usable_cores())

        group = meet(local, open_group).group
        span = Span(self, name, meeting.rank, tuple(members), hosts)
        self._groups += 1
        self._porter.enter(name, members, meeting.rank, group)
        return Met(group=group, nonce=name, word=meeting.word, span=span)

    def reach(self, name: bytes, peers: Iterable[int], wire: Wire) -> None:
        """Connects to ranks of a group."""
        self._porter.reach(name, peers, wire)

    def leave(self, name: bytes) -> None:
        """Leaves a group; with the last one the network ends."""
        self._porter.leave(name)
        self._groups -= 1
        if self._groups == 0:
            self._porter.close()


def meet_at(board: Board, meeting: Meeting, settings: Settings, security: Security) -> Met:
    """Joins the world whose ranks find each other at `board`; returns when all are there.

    Raises `RendezvousError` if they are not within the timeout, `AuthenticationError` if this rank
    is not let in.
    """
    interfaces = choose(settings.interface, available(), rails=settings.rails)
    porter = Porter(
        addresses=[interface.address for interface in interfaces],
        ports=settings.ports,
        streams=settings.streams,
        peer_timeout_s=settings.peer_timeout_s,
        security=security,
    )
    try:
        arrival = Arrival(
            rank=meeting.rank,
            size=meeting.size,
            timeout_s=meeting.timeout_s,
            addresses=porter.bound,
            staging_bytes=meeting.staging_bytes,
            host=this_host(settings.host_id),
            word=meeting.word,
            tls=security.tls,
        )
        found = find(board, arrival)
        if len(found.hosts) == 1:
            porter.close()
            return form(found, meeting.rank, timeout_s=meeting.timeout_s)
        return _join(porter, found, meeting)
    except BaseException:
        porter.close()
        raise


def _join(porter: Porter, found: Found, meeting: Meeting) -> Met:
    porter.join(
        world=found.world,
        secret=found.secret,
        rank=meeting.rank,
        contacts=found.contacts,
        timeout_s=meeting.timeout_s,
    )
    whole = Meeting(
        rank=meeting.rank,
        size=meeting.size,
        rendezvous="world",
        timeout_s=meeting.timeout_s,
        staging_bytes=meeting.staging_bytes,
        word=found.word,
    )
    return Network(porter, found).form(whole, range(meeting.size))


def _partition(host_of: Sequence[int]) -> Hosts:
    """The ranks of each host, given the host of each rank.

    >>> _partition([7, 3, 7])
    ((0, 2), (1,))
    """
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(host_of):
        ranks.setdefault(host, []).append(rank)
    return tuple(map(tuple, ranks.values()))

"""The ranks of several hosts: one network a world, and the groups that span its hosts.

A world's ranks find each other at a board, and join one network, which every group that is made
within the world shares: ranks of a group that are on one host share a segment of memory, the others
are connected when a call first needs them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from unisono.config import Settings
from unisono.errors import AbortedError
from unisono.links.interfaces import available, choose
from unisono.links.porter import Porter
from unisono.links.security import Security
from unisono.native import Group, usable_cores
from unisono.runtime.boards import Board
from unisono.runtime.finding import Arrival, Found, find, this_host
from unisono.runtime.forming import form
from unisono.runtime.meeting import Meeting, Met
from unisono.runtime.rendezvous import meet
from unisono.runtime.span import Hosts, Span, Wire
from unisono.runtime.spanning_ties import SpanningTies
from unisono.runtime.succession import Succession
from unisono.types import SingleCopy

_NAME_BYTES = 16


class Network:
    """A rank's way to all others of its world, as long as it is in one of the world's groups.

    `circle`: of those who hear of each other's losses; the world's if None. `entered` are the
    groups of all circles, which share the porter.
    """

    def __init__(
        self,
        porter: Porter,
        found: Found,
        circle: bytes | None = None,
        entered: set[bytes] | None = None,
    ) -> None:
        self._porter, self._found, self._circle = porter, found, circle
        self._entered = set[bytes]() if entered is None else entered

    def form(self, meeting: Meeting, members: Sequence[int]) -> Met:
        """A group of these ranks of the world, in this order; all of them call this.

        On one host it is as if there were no others. Raises `RendezvousError` if ranks of this host
        do not come; those of other hosts are awaited by the first call.
        """
        hosts = self._hosts(members)
        if len(hosts) == 1:
            return meet(meeting)
        name = self._name(meeting)
        return self._enter(name, meeting, members, hosts, self._meet_here(name, meeting, hosts))

    def reach(self, name: bytes, peers: Iterable[int], wire: Wire) -> None:
        """Connects to ranks of a group."""
        self._porter.reach(name, peers, wire)

    def leave(self, name: bytes) -> None:
        """Leaves a group; with the last one the network ends."""
        with contextlib.suppress(AbortedError):  # in a forked child: the groups are the parent's
            self._porter.leave(name)
        self._entered.discard(name)
        if not self._entered:
            self._porter.close()

    def ties(
        self, name: bytes, members: Sequence[int], group: Group, succession: Succession
    ) -> SpanningTies:
        """What is left between the ranks of a group that has failed."""
        hosts = self._hosts(members)
        return SpanningTies(self._porter, group, succession, name, members, hosts, self._succeed)

    def _succeed(self, meeting: Meeting, members: Sequence[int]) -> Met:
        """The same as `form` for a group that succeeds another: its ranks await each other in a
        circle of their own, in which its first tells its word."""
        hosts = self._hosts(members)
        if len(hosts) == 1:
            return meet(meeting)
        name = self._name(meeting)
        heir = Network(self._porter, self._found, name, self._entered)
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

    def _meet_here(self, name: bytes, meeting: Meeting, hosts: Hosts) -> Group:
        """The ranks of this host come to share a segment."""
        here = next(host for host in hosts if meeting.rank in host)
        local = Meeting(
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

        return meet(local, open_group).group

    def _enter(
        self, name: bytes, meeting: Meeting, members: Sequence[int], hosts: Hosts, group: Group
    ) -> Met:
        self._entered.add(name)
        self._porter.enter(name, members, meeting.rank, group, self._circle)
        span = Span(self, name, meeting.rank, tuple(members), hosts)
        return Met(
            group=group, nonce=name, word=meeting.word, span=span, timeout_s=meeting.timeout_s
        )

    def _hosts(self, members: Sequence[int]) -> Hosts:
        return _partition([self._found.contacts[member].host for member in members])

    def _name(self, meeting: Meeting) -> bytes:
        return hashlib.sha256(self._found.world + meeting.rendezvous.encode()).digest()[
            :_NAME_BYTES
        ]


def _nothing() -> None:
    """Watches for nothing."""


def meet_at(board: Board, meeting: Meeting, settings: Settings, security: Security) -> Met:
    """Joins the world whose ranks find each other at `board`; returns when all are there.

    Raises `RendezvousError` if they are not within the timeout, `AuthenticationError` if this rank
    is not let in.
    """
    found_here = available(settings.ip_version)
    interfaces = choose(settings.interface, found_here, rails=settings.rails)
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
            return form(
                found,
                meeting.rank,
                timeout_s=meeting.timeout_s,
                single_copy=meeting.single_copy,
            )
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

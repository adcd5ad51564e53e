"""Who may connect to this rank, and whom it connects to: one porter a rank and world.

A porter listens from its making, so that others can be told where; its one thread starts when it
joins the world, sleeps unless something happens, and ends with `close`. It opens connections and
hands them over; the bytes of collectives and messages never pass through it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

from unisono.control.group_endpoint import GroupEndpoint, PeerInfo
from unisono.control.peer_messages import Attempt, RecoveryInbox
from unisono.control.vote import VoteRequest
from unisono.control.world import WorldConfig
from unisono.control.world_connections import WorldConnections
from unisono.errors import AbortedError, RendezvousError
from unisono.transport import CLEAR, NO_GROUP, Address, EventLoop, Security, listen, tag_of

_STOP_S = 5.0


class ConnectionManager:
    """Listens on `addresses` (literals, one a rail) and on nothing else, on a port of `ports`.

    `streams`: connections to a peer for each rail and kind. `security`: what protects them.
    `peer_timeout_s`: how long another host may be silent. Raises `RendezvousError` if it cannot
    listen. Methods may be called from any thread; after `close`, and in a forked child, they raise
    `AbortedError`.

    >>> manager = ConnectionManager(
    ...     addresses=["127.0.0.1"], ports=None, streams=1, peer_timeout_s=2.5
    ... )
    >>> [(host, port > 0) for host, port in manager.bound]
    [('127.0.0.1', True)]
    >>> manager.close()
    """

    def __init__(
        self,
        *,
        addresses: Sequence[str],
        ports: range | None,
        streams: int,
        peer_timeout_s: float,
        security: Security = CLEAR,
    ) -> None:
        self._security = security
        self._streams, self._peer_timeout_s = streams, peer_timeout_s
        self._pid = os.getpid()
        self._sources = tuple(addresses)
        self._listeners = listen(addresses, ports)
        self._bound: tuple[Address, ...] = tuple(one.getsockname()[:2] for one in self._listeners)
        self._loop = EventLoop()
        self._joined: WorldConnections | None = None
        self._open = threading.Lock()  # taken by the one who closes it, and never waited for
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _abandon(this))

    @property
    def bound(self) -> tuple[Address, ...]:
        """Where it listens, one address a rail."""
        return self._bound

    def join(
        self,
        *,
        world: bytes,
        secret: bytes,
        rank: int,
        contacts: Sequence[PeerInfo],
        timeout_s: float,
    ) -> None:
        """Joins the ranks at `contacts` (by rank, this one too); returns when rank 0 is connected,
        on rank 0 when all are.

        `world` is equal on all ranks and this world's own, `secret` the job's. Raises
        `RendezvousError` if ranks are missing at the timeout or lost, `AuthenticationError` if rank
        0 has another secret.
        """
        if not secret:
            raise ValueError("a porter needs the job's secret")
        if not 0 <= rank < len(contacts):
            raise ValueError(f"rank {rank} of {len(contacts)}: ranks are counted from 0")
        terms = WorldConfig(
            world=world,
            rank=rank,
            contacts=tuple(contacts),
            sources=self._sources,
            secret=secret,
            security=self._security,
            streams=self._streams,
            peer_timeout_s=self._peer_timeout_s,
            timeout_s=timeout_s,
        )
        joined = self._joined = WorldConnections(self._loop, self._listeners, terms)
        self._loop.start(f"unisono-porter-{rank}")
        self._loop.call(joined.begin)
        try:
            joined.wait()
        except BaseException:
            self.close()
            raise

    def enter(
        self,
        group_id: bytes,
        members: Sequence[int],
        me: int,
        group: GroupEndpoint,
        circle: bytes | None = None,
    ) -> None:
        """This rank has entered a group: `members` are ranks of the world in the group's order,
        `me` is its place among them. They hear of each other in a circle, one that was rallied or
        the world's. What came early for the group is brought to it now."""
        joined = self._world()
        tag = NO_GROUP if circle is None else tag_of(circle)
        self._loop.call(
            lambda: joined.groups.enter(tag_of(group_id), members, me, group, joined.circle(tag))
        )

    def reach(self, group_id: bytes, peers: Iterable[int], kind: int) -> None:
        """Connects to ranks of a group: dials the lower ones, awaits the higher ones. Returns at
        once; what was reached already stays as it is."""
        groups, wanted = self._world().groups, tuple(peers)
        self._loop.call(lambda: groups.reach(tag_of(group_id), wanted, kind))

    def leave(self, group_id: bytes) -> None:
        """Leaves a group in good order. When it returns, the native end is not called any more."""
        groups = self._world().groups
        self._loop.run(lambda: groups.leave(tag_of(group_id)), _STOP_S)

    # ---- what succeeds a group that has failed

    def rally(
        self,
        circle: bytes,
        members: Sequence[int],
        word: bytes,
        timeout_s: float,
        watch: Callable[[], None],
    ) -> bytes:
        """Joins these ranks of the world, which all call this, in a circle of their own; returns
        the word of the first. `watch` is called meanwhile, and may raise. Raises `RendezvousError`
        if they do not come."""
        return self._world().rally(tag_of(circle), members, word, timeout_s, watch)

    def disband(self, circle: bytes) -> None:
        """Leaves a circle that comes to nothing."""
        self._world().disband(tag_of(circle))

    def open_box(self, attempt: Attempt, peers: Iterable[int]) -> RecoveryInbox:
        """This rank begins to shrink a group; `peers` are its other ranks, as ranks of the world,
        and all of them are dialed."""
        post, box, others = self._world().post, RecoveryInbox(), tuple(peers)
        self._loop.call(lambda: post.open(attempt, others, box))
        return box

    def shut_box(self, attempt: Attempt, *, finished: bool, for_good: bool) -> None:
        """This rank has ended that; who has not `finished` tells the others, and if it leaves the
        group `for_good`, also those who come later."""
        post = self._world().post
        self._loop.call(lambda: post.shut(attempt, finished=finished, for_good=for_good))

    def send(self, attempt: Attempt, to: int, data: bytes) -> None:
        """A text for another rank that shrinks the group."""
        post = self._world().post
        self._loop.call(lambda: post.send(attempt, to, data))

    def ask(self, attempt: Attempt, to: int, ask: VoteRequest) -> None:
        """Asks for the vote of a rank's host on what succeeds the group."""
        post = self._world().post
        self._loop.call(lambda: post.ask(attempt[0], to, ask))

    # ---- the end

    def close(self) -> None:
        """Leaves all groups and the world, and closes everything. Does nothing a second time."""
        if os.getpid() != self._pid or not self._open.acquire(blocking=False):
            return
        if self._joined is not None:
            with contextlib.suppress(AbortedError):
                self._loop.call(self._joined.goodbye)
        if self._loop.join(_STOP_S):
            self._close_descriptors()

    def _world(self) -> WorldConnections:
        if self._joined is None:
            raise RendezvousError("this porter has not joined a world")
        return self._joined

    def _close_descriptors(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _in_child(self) -> None:
        self._loop.abandon()
        self._close_descriptors()
        if self._joined is not None:
            self._joined.abandon()


def _abandon(porter: weakref.ref[ConnectionManager]) -> None:
    """A forked child would keep its parent's connections open after the parent's death."""
    found = porter()
    if found is not None:
        found._in_child()

"""The connection manager, which accepts and opens a rank's connections. A rank has one per world.

The manager listens from its construction, so that its address can be published. Its only thread
starts when it joins the world, sleeps unless an event occurs, and ends with `close`. It passes open
connections to the native core; data of collectives and point-to-point messages never passes through
it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

from unisono.errors import AbortedError, RendezvousError
from unisono.rank_connections.group_endpoint import GroupEndpoint, PeerInfo
from unisono.rank_connections.paxos_acceptor import VoteRequest
from unisono.rank_connections.peer_messages import Attempt, RecoveryInbox
from unisono.rank_connections.world import WorldConfig
from unisono.rank_connections.world_connections import WorldConnections
from unisono.transport import CLEAR, NO_GROUP, Address, EventLoop, Security, listen, tag_of

_STOP_S = 5.0


class ConnectionManager:
    """A rank's connection manager. Listens only on `addresses` (IP literals, one per rail), on a
    port of `ports`.

    `streams` is the number of connections to a peer for each rail and kind. `security` is the
    protection of the connections. `peer_timeout_s` is the time for which another host may be
    silent. Raises `RendezvousError` if it cannot listen. Any thread may call the methods. After
    `close`, and in a forked child, they raise `AbortedError`.

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
        self._world_connections: WorldConnections | None = None
        # acquired by the first `close` and never released; no thread waits
        self._open = threading.Lock()
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _abandon_in_child(this))

    @property
    def bound(self) -> tuple[Address, ...]:
        """Addresses on which the manager listens, one per rail."""
        return self._bound

    def join(
        self,
        *,
        world: bytes,
        secret: bytes,
        rank: int,
        peer_infos: Sequence[PeerInfo],
        timeout_s: float,
    ) -> None:
        """Joins the world of the ranks at `peer_infos`, which includes this rank. Returns when rank
        0 is connected; on rank 0, returns when all ranks are connected.

        `world` is equal on all ranks, and no other world uses it; `secret` is the job's. Raises
        `RendezvousError` if ranks are missing at the timeout or lost, `AuthenticationError` if rank
        0 has another secret.
        """
        if not secret:
            raise ValueError("a connection manager needs the job's secret, not an empty one")
        if not 0 <= rank < len(peer_infos):
            raise ValueError(f"rank {rank} of {len(peer_infos)}: expected a rank from 0 to size-1")
        config = WorldConfig(
            world=world,
            rank=rank,
            peer_infos=tuple(peer_infos),
            sources=self._sources,
            secret=secret,
            security=self._security,
            streams=self._streams,
            peer_timeout_s=self._peer_timeout_s,
            timeout_s=timeout_s,
        )
        joined = self._world_connections = WorldConnections(self._loop, self._listeners, config)
        self._loop.start(f"unisono-connections-{rank}")
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
        control_group: bytes | None = None,
    ) -> None:
        """Enters a group on this rank.

        `members` are world ranks in the group's order; `me` is this rank's position among them. The
        members inform each other of failures through the given control group, else through the
        world's. Connections and messages that arrived early are handled now.
        """
        joined = self._require_joined()
        tag = NO_GROUP if control_group is None else tag_of(control_group)
        self._loop.call(
            lambda: joined.groups.enter(
                tag_of(group_id), members, me, group, joined.control_group(tag)
            )
        )

    def reach(self, group_id: bytes, peers: Iterable[int], kind: int) -> None:
        """Connects to ranks of a group: dials lower ranks, and accepts dials of higher ranks.
        Returns at once. Does not change existing connections."""
        groups, wanted = self._require_joined().groups, tuple(peers)
        self._loop.call(lambda: groups.reach(tag_of(group_id), wanted, kind))

    def leave(self, group_id: bytes) -> None:
        """Leaves a group without a failure. After the return, the manager does not call the native
        group any more."""
        groups = self._require_joined().groups
        self._loop.run(lambda: groups.leave(tag_of(group_id)), _STOP_S)

    # ---- recovery after a group has failed

    def form_control_group(
        self,
        control_group: bytes,
        members: Sequence[int],
        rank0_data: bytes,
        timeout_s: float,
        watch: Callable[[], None],
    ) -> bytes:
        """Forms a control group of these world ranks, which must all call this. Returns the data of
        the first rank.

        Calls `watch`, which may raise, repeatedly during the wait. Raises `RendezvousError` if
        ranks are missing.
        """
        return self._require_joined().form_control_group(
            tag_of(control_group), members, rank0_data, timeout_s, watch
        )

    def open_inbox(self, attempt: Attempt, peers: Iterable[int]) -> RecoveryInbox:
        """Begins to shrink a group on this rank: dials `peers`, the world ranks of the group's
        other ranks. Returns the inbox for events of this attempt.
        """
        peer_messages, inbox, others = (
            self._require_joined().peer_messages,
            RecoveryInbox(),
            tuple(peers),
        )
        self._loop.call(lambda: peer_messages.open_attempt(attempt, others, inbox))
        return inbox

    def close_inbox(self, attempt: Attempt, *, finished: bool, for_good: bool) -> None:
        """Ends an attempt to shrink. Unless the attempt `finished`, tells the other ranks that this
        rank gave up. If this rank leaves the group `for_good`, ranks that begin to shrink later are
        told, too."""
        peer_messages = self._require_joined().peer_messages
        self._loop.call(
            lambda: peer_messages.close_attempt(attempt, finished=finished, for_good=for_good)
        )

    def send(self, attempt: Attempt, to: int, data: bytes) -> None:
        """Sends a recovery message to another rank that shrinks the group."""
        peer_messages = self._require_joined().peer_messages
        self._loop.call(lambda: peer_messages.send(attempt, to, data))

    def request_vote(self, attempt: Attempt, to: int, request: VoteRequest) -> None:
        """Requests the vote (Paxos) of a rank's host on the group that replaces a failed group."""
        peer_messages = self._require_joined().peer_messages
        self._loop.call(lambda: peer_messages.request_vote(attempt[0], to, request))

    # ---- closing

    def close(self) -> None:
        """Leaves all groups and the world, and closes all connections. A second call does
        nothing."""
        if os.getpid() != self._pid or not self._open.acquire(blocking=False):
            return
        if self._world_connections is not None:
            with contextlib.suppress(AbortedError):
                self._loop.call(self._world_connections.leave)
        if self._loop.join(_STOP_S):
            self._close_descriptors()

    def _require_joined(self) -> WorldConnections:
        if self._world_connections is None:
            raise RendezvousError("this connection manager has not joined a world: call join first")
        return self._world_connections

    def _close_descriptors(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _in_child(self) -> None:
        self._loop.abandon()
        self._close_descriptors()
        if self._world_connections is not None:
            self._world_connections.abandon()


def _abandon_in_child(manager: weakref.ref[ConnectionManager]) -> None:
    """Closes a forked child's copies of descriptors, which would keep connections open after the
    parent's death."""
    found = manager()
    if found is not None:
        found._in_child()

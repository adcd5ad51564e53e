"""A group that this rank has entered: its connections and its control messages."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from functools import partial

from unisono.rank_connections.control_group import ControlGroup
from unisono.rank_connections.control_messages import (
    CALLED_BYTES,
    ControlMessage,
    MessageKind,
    pack_failure,
    pack_last_calls,
    unpack_failure,
    unpack_last_calls,
)
from unisono.rank_connections.group_endpoint import (
    FAILED_EVENT,
    OVERDUE_EVENT,
    Fault,
    GroupEndpoint,
)
from unisono.rank_connections.last_call_query import QUERY_INTERVAL_S
from unisono.rank_connections.paxos_acceptor import Vote, VoteReply, VoteRequest, cast_in
from unisono.transport import (
    READ,
    Connection,
    ConnectionKind,
    Dial,
    DialFailure,
    Introduction,
    Timer,
    avoid_bbr,
    prepare,
)

# seconds before a failed dial is reported, so that the control server can report the cause first
_REPORT_DELAY_S = 0.2


class GroupConnections:
    """A rank's connections in one group.

    `members` are world ranks in the group's order; `me` is this rank's position among them. The
    loop's thread calls all methods.
    """

    def __init__(
        self,
        control_group: ControlGroup,
        tag: bytes,
        members: Sequence[int],
        me: int,
        group: GroupEndpoint,
    ) -> None:
        self.tag = tag
        self.control_group, self.world, self._me, self._group = (
            control_group,
            control_group.world,
            me,
            group,
        )
        self._members = tuple(members)
        self._peers = {rank: peer for peer, rank in enumerate(members)}
        self._reached: set[tuple[int, int]] = set()  # (peer, kind) pairs of earlier `reach` calls
        self._attached: dict[tuple[int, int], set[int]] = {}  # attached streams, by peer and kind
        self._awaited: set[tuple[int, int]] = set()
        self._dials: list[Dial] = []
        self._left: set[int] = set()
        self._is_over = False  # True once the native group must not be called any more
        self._failed = False
        self._has_sent_failure = False  # to the others
        self._has_lost_server = False
        self._queried_at = float("-inf")
        self._query_timer: Timer | None = None
        self._events = group.events_fd()
        self.world.loop.watch(self._events, READ, self._take_events)

    def leave(self) -> None:
        """Tells the other ranks that this rank leaves, and releases the native group."""
        if not self._failed:  # report a failure first, since a rank that has left reports nothing
            self._send_failure()
        self.world.loop.unwatch(self._events)
        for dial in self._dials:
            dial.cancel()
        self._dials.clear()  # ends a reference cycle: dials refer to their group
        if self._query_timer is not None:
            self._query_timer.cancel()
        self._is_over = self._failed = True
        self._has_sent_failure = False
        self._send(MessageKind.LEFT, self._members)

    def abandon(self) -> None:
        """Closes a forked child's copies of the connections."""
        self._group.abandon()

    def cast(self, request: VoteRequest) -> VoteReply:
        """Returns this host's reply to a vote request."""
        return cast_in(self._group.exchange_successor, request)

    def vote(self) -> Vote:
        """Returns this host's vote on the group that replaces a failed group."""
        return Vote.of(self._group.exchange_successor(0, 0))

    # ---- connections

    def reach(self, peers: Iterable[int], kind: int) -> None:
        """Dials peers of lower rank and awaits dials of peers of higher rank, once for each kind of
        connection.
        """
        for peer in peers:
            if peer == self._me or (peer, kind) in self._reached:
                continue
            self._reached.add((peer, kind))
            if peer > self._me:
                if (peer, kind) not in self._attached:
                    self._awaited.add((peer, kind))
            elif peer not in self._left and not self._failed:
                self._dial(peer, ConnectionKind(kind))

    def take(self, sock: Connection, introduction: Introduction) -> str:
        """Accepts a connection that a peer of higher rank dialed. Returns the reason if it is
        refused, else an empty text.
        """
        peer = self._peers.get(introduction.rank)
        if peer is None or peer <= self._me or not self.world.is_remote(introduction.rank):
            return f"rank {introduction.rank} must not dial for this group"
        have = self._attached.setdefault((peer, introduction.kind), set())
        if introduction.stream in have:
            return f"rank {introduction.rank} dialed twice for stream {introduction.stream}"
        self._awaited.discard((peer, introduction.kind))
        have.add(introduction.stream)
        self._attach(peer, introduction, sock)
        return ""

    def accept_failed(self, why: str) -> None:
        """Fails the group if it still awaits a peer's connection. Called when this rank has been
        unable to accept connections for long.
        """
        if self._awaited:
            ranks = sorted({self._members[peer] for peer, _ in self._awaited})
            self.fail(
                Fault.SYSTEM, f"rank {self.world.config.rank} cannot accept ranks {ranks}: {why}"
            )

    def _dial(self, peer: int, kind: ConnectionKind) -> None:
        to = self._members[peer]
        rails = self.world.rails(to)
        streams = self.world.config.streams * rails
        for stream in range(streams):
            introduction = Introduction(
                kind=kind,
                rank=self.world.config.rank,
                pid=os.getpid(),
                tag=self.tag,
                stream=stream,
                streams=streams,
            )
            dial = self.world.dial(
                to,
                stream % rails,
                introduction,
                host_s=self.world.config.peer_timeout_s,
                opened=partial(self._attach, peer, introduction),
                failed=partial(self._dial_failed, peer),
            )
            self._dials.append(dial)

    def _attach(self, peer: int, introduction: Introduction, sock: Connection) -> None:
        prepare(sock, self.world.config.peer_timeout_s)
        avoid_bbr(sock)
        self._group.attach(
            peer,
            int(introduction.kind),
            introduction.stream,
            introduction.streams,
            sock.detach(),
            sock.tls,
        )

    def _dial_failed(self, peer: int, failed: DialFailure) -> None:
        def fail() -> None:
            if peer not in self._left:
                fault = Fault.SYSTEM if failed.here else Fault.PEER_LOST
                self.fail(
                    fault, f"rank {self.world.config.rank} has no connection to {failed.text}"
                )

        self.world.loop.later(_REPORT_DELAY_S, fail)

    # ---- control messages

    def fail(self, fault: int, text: str) -> None:
        """Records a failure detected on this rank, and tells all ranks."""
        if not self._failed:
            self._group.fail(fault, text)
            self._send_failure()

    def lost(self, rank: int, text: str) -> None:
        """Records the loss of a world rank. The control server tells all ranks, so this rank does
        not."""
        peer = self._peers.get(rank)
        if peer is not None and peer not in self._left and not self._failed:
            self._failed = True
            self._group.fail(Fault.PEER_LOST, text)

    def server_lost(self) -> None:
        """Sends a recorded failure again, directly: the lost control server may not have forwarded
        it."""
        self._has_lost_server = True
        if self._has_sent_failure:
            self._send_failure()

    def unreachable(self, rank: int, silent: str) -> None:
        """Handles a rank that direct messages cannot reach, if there is no control server.

        If the rank's host is `silent`, the rank is lost. Otherwise the rank has left or is lost. No
        rank can distinguish the two, so it counts as left. Data that it sent before is still
        delivered.
        """
        peer = self._peers.get(rank)
        if not self._has_lost_server or peer is None:
            return
        if silent and peer not in self._left:
            self.fail(Fault.PEER_LOST, silent)
        else:
            self._take_leave(peer)

    def handle(self, message: ControlMessage) -> None:
        """Handles a message about this group. Raises `ValueError` for a malformed message."""
        match message.kind:
            case MessageKind.LEFT:
                peer = self._peers.get(message.origin)
                if peer is not None:
                    self._take_leave(peer)
            case MessageKind.FAILED:
                fault, text = unpack_failure(message.body)
                if not self._failed:
                    self._failed = True
                    self._group.fail(fault, text)
            case MessageKind.LAST_CALL_QUERY:
                # A query of the control server contains no call. Without a server, the query comes
                # from a rank and contains that rank's most recent call.
                if message.body:
                    self._take_calls([(message.origin, message.body)])
                (body,) = pack_last_calls([(self.world.config.rank, self._called())])
                self._send(MessageKind.LAST_CALLS, (message.origin,), body)
            case MessageKind.LAST_CALLS:
                self._take_calls(unpack_last_calls(message.body))
            case _:
                raise ValueError(f"a message of kind {message.kind} about a group")

    def _take_leave(self, peer: int) -> None:
        if peer not in self._left:
            self._left.add(peer)
            # Report the departure later, since the peer's last message may still be unread on
            # another connection.
            self.world.loop.later(0, partial(self._report_left, peer))

    def _report_left(self, peer: int) -> None:
        if not self._is_over:
            self._group.peer_left(peer)

    def _take_calls(self, calls: Iterable[tuple[int, bytes]]) -> None:
        for rank, called in calls:
            if len(called) != CALLED_BYTES:
                raise ValueError(f"a call of {len(called)} bytes")
            if rank in self._peers and self.world.is_remote(rank):
                self._group.record_last_call(self._peers[rank], called)

    def _take_events(self) -> None:
        events = self._group.take_events()
        if events & FAILED_EVENT and not self._failed:
            self._send_failure()
        if events & OVERDUE_EVENT:
            self._query_last_calls()

    def _send_failure(self) -> None:
        failure = self._group.failure()
        if failure is not None:
            self._failed = self._has_sent_failure = True
            self._send(MessageKind.FAILED, self._members, pack_failure(*failure))

    def _query_last_calls(self) -> None:
        """Asks the ranks of other hosts for their most recent calls, at most four times a
        second.
        """
        wait_s = self._queried_at + QUERY_INTERVAL_S - time.monotonic()
        if wait_s > 0:
            if self._query_timer is None or self._query_timer.cancelled:
                self._query_timer = self.world.loop.later(wait_s, self._query_last_calls)
            return
        if self._query_timer is not None:
            self._query_timer.cancel()
        self._queried_at = time.monotonic()
        remote = tuple(rank for rank in self._members if self.world.is_remote(rank))
        if remote:
            self._send(MessageKind.LAST_CALL_QUERY, remote, self._called())

    def _called(self) -> bytes:
        return self._group.called()[:CALLED_BYTES].ljust(CALLED_BYTES, b"\0")

    def _send(self, kind: MessageKind, to: tuple[int, ...], body: bytes = b"") -> None:
        self.world.send(
            ControlMessage(kind=kind, origin=self.world.config.rank, tag=self.tag, to=to, body=body)
        )

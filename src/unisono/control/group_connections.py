"""A group that this rank has entered: its connections and its control messages."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from functools import partial

from unisono.control.control_group import ControlGroup
from unisono.control.group_endpoint import ANXIOUS_EVENT, FAILED_EVENT, Fault, GroupEndpoint
from unisono.control.last_call_query import EACH_S
from unisono.control.messages import (
    CALLED_BYTES,
    ControlMessage,
    MessageKind,
    failed_body,
    looked_bodies,
    read_failed,
    read_looked,
)
from unisono.control.vote import Vote, VoteReply, VoteRequest, cast_in
from unisono.transport import (
    READ,
    Connection,
    ConnectionKind,
    Dial,
    DialFailure,
    Introduction,
    Timer,
    prepare,
    send_at_once,
)

_BETTER_NEWS_S = 0.2  # a dial may fail before the control server reports the reason


class GroupConnections:
    """Connections of one group.

    `members` are world ranks in the group's order; `me` is this rank's position among them. The
    loop's thread calls all methods.
    """

    def __init__(
        self,
        circle: ControlGroup,
        tag: bytes,
        members: Sequence[int],
        me: int,
        group: GroupEndpoint,
    ) -> None:
        self.tag = tag
        self.circle, self.place, self._me, self._group = circle, circle.place, me, group
        self._members = tuple(members)
        self._peers = {rank: peer for peer, rank in enumerate(members)}
        self._reached: set[tuple[int, int]] = set()  # pairs of peer and kind
        self._attached: dict[tuple[int, int], set[int]] = {}  # streams, by peer and kind
        self._awaited: set[tuple[int, int]] = set()
        self._dials: list[Dial] = []
        self._left: set[int] = set()
        self._is_over = False  # the native group is not called any more
        self._failed = False
        self._has_told = False  # the others of the failure
        self._is_orphaned = False
        self._looked_at = float("-inf")
        self._look_alarm: Timer | None = None
        self._events = group.events_fd()
        self.place.loop.watch(self._events, READ, self._take_events)

    def leave(self) -> None:
        """Tells the others, and releases the native group."""
        if not self._failed:  # later this failure would reach nobody
            self._tell_failure()
        self.place.loop.unwatch(self._events)
        for dial in self._dials:
            dial.cancel()
        self._dials.clear()  # a dial and its group refer to each other
        if self._look_alarm is not None:
            self._look_alarm.cancel()
        self._is_over = self._failed = True
        self._has_told = False
        self._tell(MessageKind.LEFT, self._members)

    def abandon(self) -> None:
        """Closes a forked child's copies of the connections."""
        self._group.abandon()

    def cast(self, ask: VoteRequest) -> VoteReply:
        """Returns this host's reply to a vote request."""
        return cast_in(self._group.exchange_successor, ask)

    def vote(self) -> Vote:
        """Returns this host's vote on the group that replaces a failed one."""
        return Vote.of(self._group.exchange_successor(0, 0))

    # ---- connections

    def reach(self, peers: Iterable[int], kind: int) -> None:
        """Dials lower peers and waits for higher ones, once for each kind of connection."""
        for peer in peers:
            if peer == self._me or (peer, kind) in self._reached:
                continue
            self._reached.add((peer, kind))
            if peer > self._me:
                if (peer, kind) not in self._attached:
                    self._awaited.add((peer, kind))
            elif peer not in self._left and not self._failed:
                self._dial(peer, ConnectionKind(kind))

    def take(self, sock: Connection, said: Introduction) -> str:
        """Takes a connection of a higher peer; returns the reason for a refusal, else an empty
        text."""
        peer = self._peers.get(said.rank)
        if peer is None or peer <= self._me or not self.place.is_remote(said.rank):
            return f"rank {said.rank} must not dial for this group"
        have = self._attached.setdefault((peer, said.kind), set())
        if said.stream in have:
            return f"rank {said.rank} dialed twice for stream {said.stream}"
        self._awaited.discard((peer, said.kind))
        have.add(said.stream)
        self._attach(peer, said, sock)
        return ""

    def starved(self, why: str) -> None:
        """Fails the group if a peer is awaited while no connection can be accepted for long."""
        if self._awaited:
            ranks = sorted({self._members[peer] for peer, _ in self._awaited})
            self.fail(
                Fault.SYSTEM, f"rank {self.place.terms.rank} cannot accept ranks {ranks}: {why}"
            )

    def _dial(self, peer: int, kind: ConnectionKind) -> None:
        to = self._members[peer]
        rails = self.place.rails(to)
        streams = self.place.terms.streams * rails
        for stream in range(streams):
            said = Introduction(
                kind=kind,
                rank=self.place.terms.rank,
                pid=os.getpid(),
                tag=self.tag,
                stream=stream,
                streams=streams,
            )
            dial = self.place.dial(
                to,
                stream % rails,
                said,
                host_s=self.place.terms.peer_timeout_s,
                opened=partial(self._attach, peer, said),
                failed=partial(self._dial_failed, peer),
            )
            self._dials.append(dial)

    def _attach(self, peer: int, said: Introduction, sock: Connection) -> None:
        prepare(sock, self.place.terms.peer_timeout_s)
        send_at_once(sock)
        self._group.attach(peer, int(said.kind), said.stream, said.streams, sock.detach(), sock.tls)

    def _dial_failed(self, peer: int, failed: DialFailure) -> None:
        def fail() -> None:
            if peer not in self._left:
                fault = Fault.SYSTEM if failed.here else Fault.PEER_LOST
                self.fail(fault, f"rank {self.place.terms.rank} has no connection to {failed.text}")

        self.place.loop.later(_BETTER_NEWS_S, fail)

    # ---- control messages

    def fail(self, fault: int, text: str) -> None:
        """Records a failure found on this rank, and tells all."""
        if not self._failed:
            self._group.fail(fault, text)
            self._tell_failure()

    def gone(self, rank: int, text: str) -> None:
        """Records the loss of a world rank. The control server tells all ranks, so this rank does
        not."""
        peer = self._peers.get(rank)
        if peer is not None and peer not in self._left and not self._failed:
            self._failed = True
            self._group.fail(Fault.PEER_LOST, text)

    def orphaned(self) -> None:
        """Repeats a failure message directly: the control server is gone, perhaps with that
        message."""
        self._is_orphaned = True
        if self._has_told:
            self._tell_failure()

    def unreached(self, rank: int, silent: str) -> None:
        """Handles a rank that direct messages cannot reach, if there is no control server.

        If the rank's host is `silent`, the rank is lost. Otherwise it has left or is lost, and no
        rank can tell which, so it counts as left. Data that it sent before is still delivered.
        """
        peer = self._peers.get(rank)
        if not self._is_orphaned or peer is None:
            return
        if silent and peer not in self._left:
            self.fail(Fault.PEER_LOST, silent)
        else:
            self._take_leave(peer)

    def hear(self, message: ControlMessage) -> None:
        """Handles a message about this group. Raises `ValueError` for a malformed message."""
        match message.say:
            case MessageKind.LEFT:
                peer = self._peers.get(message.origin)
                if peer is not None:
                    self._take_leave(peer)
            case MessageKind.FAILED:
                fault, text = read_failed(message.body)
                if not self._failed:
                    self._failed = True
                    self._group.fail(fault, text)
            case MessageKind.LOOK:
                # the server reports calls itself; without a server, the query holds the sender's
                # last call
                if message.body:
                    self._take_calls([(message.origin, message.body)])
                (body,) = looked_bodies([(self.place.terms.rank, self._called())])
                self._tell(MessageKind.LOOKED, (message.origin,), body)
            case MessageKind.LOOKED:
                self._take_calls(read_looked(message.body))
            case _:
                raise ValueError(f"a message of kind {message.say} about a group")

    def _take_leave(self, peer: int) -> None:
        if peer not in self._left:
            self._left.add(peer)
            # Its last message may be on a connection that the loop reads after this one.
            self.place.loop.later(0, partial(self._tell_left, peer))

    def _tell_left(self, peer: int) -> None:
        if not self._is_over:
            self._group.peer_left(peer)

    def _take_calls(self, calls: Iterable[tuple[int, bytes]]) -> None:
        for rank, called in calls:
            if len(called) != CALLED_BYTES:
                raise ValueError(f"a call of {len(called)} bytes")
            if rank in self._peers and self.place.is_remote(rank):
                self._group.heard(self._peers[rank], called)

    def _take_events(self) -> None:
        events = self._group.take_events()
        if events & FAILED_EVENT and not self._failed:
            self._tell_failure()
        if events & ANXIOUS_EVENT:
            self._look()

    def _tell_failure(self) -> None:
        failure = self._group.failure()
        if failure is not None:
            self._failed = self._has_told = True
            self._tell(MessageKind.FAILED, self._members, failed_body(*failure))

    def _look(self) -> None:
        """Asks all ranks for their last calls, at most four times a second."""
        wait_s = self._looked_at + EACH_S - time.monotonic()
        if wait_s > 0:
            if self._look_alarm is None or self._look_alarm.cancelled:
                self._look_alarm = self.place.loop.later(wait_s, self._look)
            return
        if self._look_alarm is not None:
            self._look_alarm.cancel()
        self._looked_at = time.monotonic()
        remote = tuple(rank for rank in self._members if self.place.is_remote(rank))
        if remote:
            self._tell(MessageKind.LOOK, remote, self._called())

    def _called(self) -> bytes:
        return self._group.called()[:CALLED_BYTES].ljust(CALLED_BYTES, b"\0")

    def _tell(self, say: MessageKind, to: tuple[int, ...], body: bytes = b"") -> None:
        self.place.tell(
            ControlMessage(say=say, origin=self.place.terms.rank, tag=self.tag, to=to, body=body)
        )

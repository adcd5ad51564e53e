"""Direct messages between ranks while they shrink a group: recovery messages and votes.

These messages go directly between connection managers, because the control server may be lost. In
that case, messages about groups also go directly. A rank dials each rank to which it sends
messages, but a vote reply uses the connection of its request. A recovery message waits here if the
receiving rank has not begun to shrink. The connection manager answers vote requests for its host at
once, until the rank leaves the group.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TypeAlias

from unisono.rank_connections.control_messages import ControlMessage, MessageKind
from unisono.rank_connections.entered_groups import EnteredGroups
from unisono.rank_connections.paxos_acceptor import (
    VotePhase,
    VoteReply,
    VoteRequest,
    unpack_reply,
    unpack_request,
)
from unisono.rank_connections.watched_channel import WatchedChannel
from unisono.rank_connections.world import World
from unisono.transport import TAG_BYTES, ConnectionKind, Dial, DialFailure, Introduction

_MOST_WAITING = 4096  # maximum of messages that wait until this rank begins to shrink their group
_PROCESS_S = 5.0  # if the host answers but the process does not in this time, dial again
_PAUSE_S = 0.1  # pause before a new dial, if this process is short of descriptors
_FOR_GOOD = b"for good"

Attempt: TypeAlias = tuple[bytes, bytes]
"""An attempt to shrink a group: the group's tag, and a tag that all ranks of the attempt share."""

_GROUP_MESSAGES = (MessageKind.FAILED, MessageKind.LAST_CALL_QUERY, MessageKind.LAST_CALLS)


# ---- events for a rank that shrinks a group; ranks are world ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryText:
    """A recovery message of another rank."""

    source: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteArrived:
    """The arrival of a vote reply from another rank's host. The reply is None if that rank has left
    the group and has no vote.
    """

    source: int
    reply: VoteReply | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """A rank that cannot be reached, for an unknown reason."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """Another rank that gave up this attempt."""

    rank: int


RecoveryEvent: TypeAlias = RecoveryText | VoteArrived | Unreachable | GaveUp


class RecoveryInbox:
    """Queue of events for a rank that shrinks."""

    def __init__(self) -> None:
        self._events: SimpleQueue[RecoveryEvent] = SimpleQueue()

    def put(self, event: RecoveryEvent) -> None:
        """Adds an event. The loop's thread calls this."""
        self._events.put(event)

    def take(self, timeout_s: float) -> list[RecoveryEvent]:
        """Returns all events. Waits at most `timeout_s` for an event."""
        found: list[RecoveryEvent] = []
        try:
            found.append(self._events.get(timeout_s > 0, timeout_s))
            while True:
                found.append(self._events.get_nowait())
        except Empty:
            return found


# ---- the connection manager's end; the loop's thread calls all methods


class PeerMessages:
    """Direct messages of one connection manager."""

    def __init__(
        self, world: World, groups: EnteredGroups, handle: Callable[[ControlMessage], None]
    ) -> None:
        """`handle` is called with every message about one of `groups`, except recovery messages."""
        self._world, self._groups, self._handle = world, groups, handle
        self._rank = world.config.rank
        self._peer_channels: dict[int, _PeerChannel] = {}
        self._channels: set[WatchedChannel] = set()
        self._inboxes: dict[Attempt, RecoveryInbox] = {}
        self._waiting: deque[tuple[Attempt, RecoveryEvent]] = deque(maxlen=_MOST_WAITING)

    def open_attempt(self, attempt: Attempt, peers: tuple[int, ...], inbox: RecoveryInbox) -> None:
        """Begins to shrink a group. `peers` are the group's other ranks."""
        self._inboxes[attempt] = inbox
        for waiting in [waiting for waiting in self._waiting if waiting[0] == attempt]:
            self._waiting.remove(waiting)
            inbox.put(waiting[1])
        for rank in peers:
            self._peer_channel(rank)

    def close_attempt(self, attempt: Attempt, *, finished: bool, for_good: bool) -> None:
        """Ends an attempt. Unless the attempt `finished`, tells all reachable ranks not to wait for
        this rank. If `for_good`, ranks that begin to shrink later are told, too."""
        self._inboxes.pop(attempt, None)
        if not finished:
            body = attempt[1] + (_FOR_GOOD if for_good else b"")
            for rank in list(self._peer_channels):
                self._send_to(attempt[0], rank, MessageKind.LEFT, body)

    def send_message(self, message: ControlMessage) -> None:
        """Sends a message about a group directly to its receivers, when there is no control server.

        A departure is sent only as an answer to one rank: other ranks detect it by their
        connections.
        """
        if message.kind in _GROUP_MESSAGES or (
            message.kind is MessageKind.LEFT and len(message.to) == 1
        ):
            for rank in message.to:
                if rank != self._rank:
                    self._peer_channel(rank).send(replace(message, to=()))

    def send(self, attempt: Attempt, to: int, data: bytes) -> None:
        """Sends a recovery message to rank `to`. The message waits there until that rank also
        shrinks the group. Drops the message if that rank is unreachable."""
        self._send_to(attempt[0], to, MessageKind.RECOVERY_TEXT, attempt[1] + data)

    def request_vote(self, tag: bytes, to: int, request: VoteRequest) -> None:
        """Requests the vote of a rank's host; the reply becomes an event."""
        self._send_to(tag, to, MessageKind.VOTE_REQUEST, request.pack())

    def take(self, sock: socket.socket, introduction: Introduction) -> None:
        """Takes over a connection that another rank dialed."""

        def received(message: ControlMessage) -> None:
            self.received(introduction.rank, message, channel)

        channel = WatchedChannel(
            self._world.loop,
            sock,
            self._world.config.peer_timeout_s,
            received=received,
            ended=lambda _: self._channels.discard(channel),
        )
        self._channels.add(channel)

    def close(self) -> None:
        """Closes all connections."""
        for peer_channel in list(self._peer_channels.values()):
            peer_channel.close()
        for channel in list(self._channels):
            channel.close()

    def unreachable(self, rank: int, silent: str) -> None:
        """Records that a rank is unreachable. `silent` is the error text if its host is silent,
        else empty."""
        self._peer_channels.pop(rank, None)
        for inbox in self._inboxes.values():
            inbox.put(Unreachable(rank=rank))
        self._groups.unreachable(rank, silent)

    def received(self, rank: int, message: ControlMessage, channel: WatchedChannel) -> None:
        """Handles a message from a rank. Raises `ValueError` for a malformed message."""
        if message.origin != rank:
            raise ValueError(f"a message with origin {message.origin} from rank {rank}")
        if rank in self._peer_channels:
            self._peer_channels[rank].mark_read()
        attempt, data = (message.tag, message.body[:TAG_BYTES]), message.body[TAG_BYTES:]
        match message.kind:
            case kind if kind in _GROUP_MESSAGES:
                self._handle(message)
            # Without a body, LEFT means that the rank left the group; with a body, that it left an
            # attempt to shrink.
            case MessageKind.LEFT if not message.body:
                self._handle(message)
            case MessageKind.VOTE_REQUEST:
                self._handle_request(message.tag, unpack_request(message.body), channel)
            case MessageKind.VOTE_REPLY:
                reply = unpack_reply(message.body) if message.body else None
                for (tag, _), inbox in self._inboxes.items():
                    if tag == message.tag:
                        inbox.put(VoteArrived(source=rank, reply=reply))
            case MessageKind.RECOVERY_TEXT:
                if attempt in self._inboxes or not self._send_decision(message.tag, channel):
                    self._put(attempt, RecoveryText(source=rank, data=data))
            case MessageKind.LEFT if attempt in self._inboxes or data == _FOR_GOOD:
                self._put(attempt, GaveUp(rank=rank))
            case MessageKind.LEFT:
                pass  # the attempt has ended on this rank, too
            case _:
                raise ValueError(f"a direct message of unexpected kind {message.kind}")

    def _handle_request(self, tag: bytes, request: VoteRequest, channel: WatchedChannel) -> None:
        reply = self._groups.cast(tag, request)
        if request.phase is VotePhase.DECIDED:
            return
        if reply is not None:
            channel.send(self._message(tag, MessageKind.VOTE_REPLY, reply.pack()))
        elif self._groups.vote(tag) is not None:
            self._send_decision(tag, channel)
            channel.send(self._message(tag, MessageKind.VOTE_REPLY, b""))

    def _send_decision(self, tag: bytes, channel: WatchedChannel) -> bool:
        """Sends the decision, if there is one, to a rank that asks after it was made. Returns True
        if there is one.
        """
        vote = self._groups.vote(tag)
        if vote is None or not vote.decided:
            return False
        decision = VoteRequest(phase=VotePhase.DECIDED, ballot=vote.ballot, choice=vote.choice)
        channel.send(self._message(tag, MessageKind.VOTE_REQUEST, decision.pack()))
        return True

    def _put(self, attempt: Attempt, event: RecoveryEvent) -> None:
        if attempt in self._inboxes:
            self._inboxes[attempt].put(event)
        else:
            self._waiting.append((attempt, event))

    def _send_to(self, tag: bytes, to: int, kind: MessageKind, body: bytes) -> None:
        if to in self._peer_channels:
            self._peer_channels[to].send(self._message(tag, kind, body))

    def _peer_channel(self, to: int) -> _PeerChannel:
        if to not in self._peer_channels:
            self._peer_channels[to] = _PeerChannel(self, self._world, to)
        return self._peer_channels[to]

    def _message(self, tag: bytes, kind: MessageKind, body: bytes) -> ControlMessage:
        return ControlMessage(kind=kind, origin=self._rank, tag=tag, body=body)


class _PeerChannel:
    """Connection to one rank: a dial, then a channel.

    If the dial or the channel ends, the rank is unreachable, for an unknown reason.
    """

    def __init__(self, messages: PeerMessages, world: World, rank: int) -> None:
        self._messages, self._world, self._rank = messages, world, rank
        self._pending: list[ControlMessage] = []
        self._channel: WatchedChannel | None = None
        self._is_closed = False
        self._dial = self._begin()

    def send(self, message: ControlMessage) -> None:
        if self._channel is None:
            if (
                message.kind is MessageKind.LAST_CALL_QUERY
            ):  # queries repeat: replace an earlier one that is not sent yet
                asked = (message.kind, message.tag)
                self._pending = [old for old in self._pending if (old.kind, old.tag) != asked]
            self._pending.append(message)
        elif message.kind in (MessageKind.VOTE_REQUEST, MessageKind.LAST_CALL_QUERY):
            self._channel.send_query(message)
        else:
            self._channel.send(message)

    def mark_read(self) -> None:
        """Records that the rank reads its messages, since it has sent a message on another
        connection.
        """
        if self._channel is not None:
            self._channel.mark_read()

    def close(self) -> None:
        self._is_closed = True
        self._dial.cancel()
        if self._channel is not None:
            self._channel.close()

    def _begin(self) -> Dial:
        introduction = Introduction(
            kind=ConnectionKind.PEER, rank=self._world.config.rank, pid=os.getpid()
        )
        return self._world.dial(
            self._rank,
            0,
            introduction,
            host_s=self._world.config.peer_timeout_s,
            process_s=_PROCESS_S,
            opened=self._opened,
            failed=self._fail_later,
        )

    def _opened(self, sock: socket.socket) -> None:
        self._channel = WatchedChannel(
            self._world.loop,
            sock,
            self._world.config.peer_timeout_s,
            received=self._received,
            ended=self._channel_ended,
        )
        for message in self._pending:
            self.send(message)
        self._pending.clear()

    def _received(self, message: ControlMessage) -> None:
        assert self._channel is not None
        self._messages.received(self._rank, message, self._channel)

    def _channel_ended(self, why: str) -> None:
        assert self._channel is not None
        host = self._world.config.peer_infos[self._rank].addresses[0][0]
        text = f"rank {self._rank} (host {host}) {why}"
        self._messages.unreachable(self._rank, text if self._channel.was_silent else "")

    def _fail_later(self, failed: DialFailure) -> None:
        """Reports a failed dial later, since the constructor of `Dial` may call this before the new
        object is stored. If this process is short of descriptors, every dial fails at once, so the
        report comes after a pause.
        """
        self._world.loop.later(_PAUSE_S if failed.here else 0, lambda: self._failed(failed))

    def _failed(self, failed: DialFailure) -> None:
        if self._is_closed:
            return
        if failed.answered or failed.here:  # dial again: the peer may be alive but stopped
            self._dial = self._begin()
        else:
            config = self._world.config
            text = f"rank {config.rank} has no connection to {failed.text}"
            self._messages.unreachable(self._rank, text if failed.silent else "")

"""Direct messages between ranks while they shrink a group: recovery messages and votes.

These messages go directly between connection managers, because the control server may be gone. In
that case messages about groups go this way, too. A rank dials each rank that it sends to; a vote
reply returns on the connection of its request. A recovery message waits here if the receiving rank
has not begun to shrink. The connection manager answers vote requests for its host at once, until
the rank leaves the group.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TypeAlias

from unisono.control.channel import ControlChannel
from unisono.control.entered_groups import EnteredGroups
from unisono.control.messages import ControlMessage, MessageKind
from unisono.control.vote import VotePhase, VoteReply, VoteRequest, read_answer, read_ask
from unisono.control.world import World
from unisono.transport import TAG_BYTES, ConnectionKind, Dial, DialFailure, Introduction

_MOST_WAITING = 4096  # messages for a group that this rank does not shrink yet
_PROCESS_S = 5.0  # limit for a process whose host answers; after it, the rank is dialed again
_PAUSE_S = 0.1  # if this process is short of descriptors
_FOR_GOOD = b"for good"

Attempt: TypeAlias = tuple[bytes, bytes]
"""An attempt to shrink a group: the group's tag, and a tag that all ranks of the attempt share."""

_OF_GROUPS = (MessageKind.FAILED, MessageKind.LOOK, MessageKind.LOOKED)


# ---- events for a rank that shrinks; ranks are the world's


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryText:
    """A recovery message of another rank."""

    source: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteArrived:
    """The reply of another rank's host; None if that rank has left the group and has no vote."""

    source: int
    answer: VoteReply | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """A rank is out of reach, for an unknown reason."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """Another rank gave up this attempt."""

    rank: int


News: TypeAlias = RecoveryText | VoteArrived | Unreachable | GaveUp


class RecoveryInbox:
    """Queue of events for a rank that shrinks."""

    def __init__(self) -> None:
        self._news: SimpleQueue[News] = SimpleQueue()

    def put(self, news: News) -> None:
        """Adds an event. The loop's thread calls this."""
        self._news.put(news)

    def take(self, timeout_s: float) -> list[News]:
        """Returns all events; waits at most `timeout_s` for the first."""
        found: list[News] = []
        try:
            found.append(self._news.get(timeout_s > 0, timeout_s))
            while True:
                found.append(self._news.get_nowait())
        except Empty:
            return found


# ---- the connection manager's side; all in the loop's thread


class PeerMessages:
    """Direct messages of one connection manager."""

    def __init__(
        self, place: World, groups: EnteredGroups, hear: Callable[[ControlMessage], None]
    ) -> None:
        """`hear` takes messages about `groups` that do not concern recovery."""
        self._place, self._groups, self._hear = place, groups, hear
        self._rank = place.terms.rank
        self._ways: dict[int, _PeerChannel] = {}
        self._lines: set[ControlChannel] = set()
        self._boxes: dict[Attempt, RecoveryInbox] = {}
        self._waiting: deque[tuple[Attempt, News]] = deque(maxlen=_MOST_WAITING)

    def open(self, attempt: Attempt, peers: tuple[int, ...], box: RecoveryInbox) -> None:
        """Begins to shrink a group; `peers` are its other ranks."""
        self._boxes[attempt] = box
        for waiting in [waiting for waiting in self._waiting if waiting[0] == attempt]:
            self._waiting.remove(waiting)
            box.put(waiting[1])
        for rank in peers:
            self._way(rank)

    def shut(self, attempt: Attempt, *, finished: bool, for_good: bool) -> None:
        """Ends an attempt. Unless the attempt `finished`, all reachable ranks are told not to wait;
        if `for_good`, ranks that start later are told, too."""
        self._boxes.pop(attempt, None)
        if not finished:
            body = attempt[1] + (_FOR_GOOD if for_good else b"")
            for rank in list(self._ways):
                self._tell(attempt[0], rank, MessageKind.LEFT, body)

    def tell(self, message: ControlMessage) -> None:
        """Sends a message about a group directly, if there is no control server.

        A departure is sent only as an answer to one rank: otherwise ranks detect it by their
        connections.
        """
        if message.say in _OF_GROUPS or (message.say is MessageKind.LEFT and len(message.to) == 1):
            for rank in message.to:
                if rank != self._rank:
                    self._way(rank).say(replace(message, to=()))

    def send(self, attempt: Attempt, to: int, data: bytes) -> None:
        """Sends a recovery message, which waits until the other rank shrinks, too. Drops it if that
        rank is out of reach."""
        self._tell(attempt[0], to, MessageKind.POST, attempt[1] + data)

    def ask(self, tag: bytes, to: int, ask: VoteRequest) -> None:
        """Requests the vote of a rank's host; the reply becomes an event."""
        self._tell(tag, to, MessageKind.ASK, ask.pack())

    def take(self, sock: socket.socket, said: Introduction) -> None:
        """Takes a connection that another rank dialed."""

        def heard(message: ControlMessage) -> None:
            self.heard(said.rank, message, line)

        line = ControlChannel(
            self._place.loop,
            sock,
            self._place.terms.peer_timeout_s,
            heard=heard,
            ended=lambda _: self._lines.discard(line),
        )
        self._lines.add(line)

    def close(self) -> None:
        """Closes all connections."""
        for way in list(self._ways.values()):
            way.close()
        for line in list(self._lines):
            line.close()

    def unreached(self, rank: int, silent: str) -> None:
        """Records that a rank is out of reach. `silent` is the error text if its host is silent,
        else empty."""
        self._ways.pop(rank, None)
        for box in self._boxes.values():
            box.put(Unreachable(rank=rank))
        self._groups.unreached(rank, silent)

    def heard(self, rank: int, message: ControlMessage, line: ControlChannel) -> None:
        """Handles a message from a rank. Raises `ValueError` for a malformed message."""
        if message.origin != rank:
            raise ValueError(f"a message with origin {message.origin} from rank {rank}")
        if rank in self._ways:
            self._ways[rank].is_read()
        attempt, data = (message.tag, message.body[:TAG_BYTES]), message.body[TAG_BYTES:]
        match message.say:
            case say if say in _OF_GROUPS:
                self._hear(message)
            # of the group; with a body, of an attempt to shrink
            case MessageKind.LEFT if not message.body:
                self._hear(message)
            case MessageKind.ASK:
                self._asked(message.tag, read_ask(message.body), line)
            case MessageKind.ANSWER:
                answer = read_answer(message.body) if message.body else None
                for (tag, _), box in self._boxes.items():
                    if tag == message.tag:
                        box.put(VoteArrived(source=rank, answer=answer))
            case MessageKind.POST:
                if attempt in self._boxes or not self._tell_decision(message.tag, line):
                    self._put(attempt, RecoveryText(source=rank, data=data))
            case MessageKind.LEFT if attempt in self._boxes or data == _FOR_GOOD:
                self._put(attempt, GaveUp(rank=rank))
            case MessageKind.LEFT:
                pass  # of an attempt that has ended here, too
            case _:
                raise ValueError(f"a direct message of unexpected kind {message.say}")

    def _asked(self, tag: bytes, ask: VoteRequest, line: ControlChannel) -> None:
        answer = self._groups.cast(tag, ask)
        if ask.step is VotePhase.KNOW:
            return
        if answer is not None:
            line.say(self._message(tag, MessageKind.ANSWER, answer.pack()))
        elif self._groups.vote(tag) is not None:
            self._tell_decision(tag, line)
            line.say(self._message(tag, MessageKind.ANSWER, b""))

    def _tell_decision(self, tag: bytes, line: ControlChannel) -> bool:
        """Tells a decision to a rank that asks after it was made. Returns whether there is a
        decision."""
        vote = self._groups.vote(tag)
        if vote is None or not vote.decided:
            return False
        known = VoteRequest(step=VotePhase.KNOW, ballot=vote.ballot, choice=vote.choice)
        line.say(self._message(tag, MessageKind.ASK, known.pack()))
        return True

    def _put(self, attempt: Attempt, news: News) -> None:
        if attempt in self._boxes:
            self._boxes[attempt].put(news)
        else:
            self._waiting.append((attempt, news))

    def _tell(self, tag: bytes, to: int, say: MessageKind, body: bytes) -> None:
        if to in self._ways:
            self._ways[to].say(self._message(tag, say, body))

    def _way(self, to: int) -> _PeerChannel:
        if to not in self._ways:
            self._ways[to] = _PeerChannel(self, self._place, to)
        return self._ways[to]

    def _message(self, tag: bytes, say: MessageKind, body: bytes) -> ControlMessage:
        return ControlMessage(say=say, origin=self._rank, tag=tag, body=body)


class _PeerChannel:
    """Connection to one rank: a dial, then a channel.

    If either ends, the rank is out of reach, for an unknown reason.
    """

    def __init__(self, post: PeerMessages, place: World, rank: int) -> None:
        self._post, self._place, self._rank = post, place, rank
        self._pending: list[ControlMessage] = []
        self._line: ControlChannel | None = None
        self._is_closed = False
        self._dial = self._begin()

    def say(self, message: ControlMessage) -> None:
        if self._line is None:
            if message.say is MessageKind.LOOK:  # repeated, also for a process that is stopped
                asked = (message.say, message.tag)
                self._pending = [old for old in self._pending if (old.say, old.tag) != asked]
            self._pending.append(message)
        elif message.say in (MessageKind.ASK, MessageKind.LOOK):
            self._line.ask(message)
        else:
            self._line.say(message)

    def is_read(self) -> None:
        """Records that the rank reads: it has sent a message on a connection of its own."""
        if self._line is not None:
            self._line.is_read()

    def close(self) -> None:
        self._is_closed = True
        self._dial.cancel()
        if self._line is not None:
            self._line.close()

    def _begin(self) -> Dial:
        said = Introduction(kind=ConnectionKind.POST, rank=self._place.terms.rank, pid=os.getpid())
        return self._place.dial(
            self._rank,
            0,
            said,
            host_s=self._place.terms.peer_timeout_s,
            process_s=_PROCESS_S,
            opened=self._opened,
            failed=self._fail_later,
        )

    def _opened(self, sock: socket.socket) -> None:
        self._line = ControlChannel(
            self._place.loop,
            sock,
            self._place.terms.peer_timeout_s,
            heard=self._heard,
            ended=self._line_ended,
        )
        for message in self._pending:
            self.say(message)
        self._pending.clear()

    def _heard(self, message: ControlMessage) -> None:
        assert self._line is not None
        self._post.heard(self._rank, message, self._line)

    def _line_ended(self, why: str) -> None:
        assert self._line is not None
        host = self._place.terms.contacts[self._rank].addresses[0][0]
        text = f"rank {self._rank} (host {host}) {why}"
        self._post.unreached(self._rank, text if self._line.was_silent else "")

    def _fail_later(self, failed: DialFailure) -> None:
        """Reports a failed dial later: it may fail while it is constructed. If descriptors are
        short here, every dial does."""
        self._place.loop.later(_PAUSE_S if failed.here else 0, lambda: self._failed(failed))

    def _failed(self, failed: DialFailure) -> None:
        if self._is_closed:
            return
        if failed.answered or failed.here:  # the process may live: perhaps it is stopped
            self._dial = self._begin()
        else:
            terms = self._place.terms
            text = f"rank {terms.rank} has no connection to {failed.text}"
            self._post.unreached(self._rank, text if failed.silent else "")

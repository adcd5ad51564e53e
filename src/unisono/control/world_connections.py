"""The connections of a connection manager that joins a world: acceptor, control groups and
groups."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from unisono.control.control_group import ControlGroup
from unisono.control.entered_groups import EnteredGroups
from unisono.control.messages import ControlMessage
from unisono.control.peer_messages import PeerMessages
from unisono.control.world import World, WorldConfig
from unisono.errors import AuthenticationError, RendezvousError
from unisono.transport import (
    NO_GROUP,
    Acceptor,
    Connection,
    ConnectionKind,
    EventLoop,
    Introduction,
    purpose_of,
)

_GOODBYE_S = 1.0
_MOST_EARLY = 1024  # ranks that dial for control groups that do not exist here yet


class WorldConnections:
    """Acceptor, control groups and groups, on one event loop.

    Only the loop's thread uses `begin`, `goodbye`, `circle`, `groups` and `post`; other threads use
    the rest.
    """

    def __init__(
        self, loop: EventLoop, listeners: Sequence[socket.socket], terms: WorldConfig
    ) -> None:
        self._loop, self._listeners, self._terms = loop, listeners, terms
        self._place = World(loop=loop, terms=terms, tell=self._tell)
        self.groups = EnteredGroups(self._refuse)
        self.post = PeerMessages(
            self._place,
            self.groups,
            lambda message: self.groups.hear(message, self._world, self._tell),
        )
        everybody = range(len(terms.contacts))
        self._world = self._circle_of(NO_GROUP, everybody, b"")
        self._circles = {NO_GROUP: self._world}
        self._early: deque[tuple[Connection, Introduction]] = deque()
        self._door: Acceptor | None = None

    def _tell(self, message: ControlMessage) -> None:
        self.post.tell(message)

    def begin(self) -> None:
        """Starts accepting, and joins the world's control group."""
        self._world.begin(self._terms.timeout_s)
        self._door = Acceptor(
            self._loop,
            self._listeners,
            secret=self._terms.secret,
            purpose=purpose_of(self._terms.world, self._terms.rank),
            security=self._terms.security,
            arrived=self._arrived,
            starved=self._starved,
        )

    def wait(self) -> None:
        """Waits until this rank is connected; on rank 0, until all ranks are. Raises a failure that
        occurred meanwhile."""
        self._world.wait(self._terms.timeout_s)

    def circle(self, tag: bytes) -> ControlGroup:
        """Returns an existing control group. For the loop's thread."""
        return self._circles[tag]

    def rally(
        self,
        tag: bytes,
        members: Sequence[int],
        word: bytes,
        timeout_s: float,
        watch: Callable[[], None],
    ) -> bytes:
        """Forms a control group of these ranks, which all call this; returns the first rank's
        data."""
        circle = self._circle_of(tag, members, word)
        self._loop.call(lambda: self._begin(circle))
        try:
            circle.wait(timeout_s, watch)
        except AuthenticationError as error:
            # The first rank knew the secret when it joined the world: it ended during its proof.
            self.disband(tag)
            raise RendezvousError(str(error)) from error
        except BaseException:
            self.disband(tag)
            raise
        return circle.word

    def disband(self, tag: bytes) -> None:
        """Leaves a control group and forgets it."""
        self._loop.call(lambda: self._end(tag))

    def goodbye(self) -> None:
        """Leaves all groups in good order, as far as the others acknowledge, and ends the loop. For
        the loop's thread."""
        try:
            if self._door is not None:
                self._door.close()
            self.groups.leave_all()
            for circle in self._circles.values():
                circle.bye()
        finally:
            self._await_end(time.monotonic() + _GOODBYE_S)

    def abandon(self) -> None:
        """Closes a forked child's copies of the connections that the loop does not watch."""
        self.groups.abandon()
        for sock, _ in self._early:
            sock.close()

    def _await_end(self, deadline: float) -> None:
        ended = all(circle.ended() for circle in self._circles.values())
        if ended or time.monotonic() > deadline:
            self._close()
        else:
            self._loop.later(0.002, lambda: self._await_end(deadline))

    def _close(self) -> None:
        try:
            for circle in self._circles.values():
                circle.close()
            for sock, _ in self._early:
                sock.close()
            self.post.close()
            for listener in self._listeners:
                listener.close()
        finally:
            self._loop.end()

    # ---- control groups

    def _circle_of(self, tag: bytes, members: Sequence[int], word: bytes) -> ControlGroup:
        return ControlGroup(self._place, tag, members, word, self.groups.hear, self.groups.orphaned)

    def _begin(self, circle: ControlGroup) -> None:
        self._circles[circle.tag] = circle
        circle.begin(self._terms.peer_timeout_s)
        early, self._early = self._early, deque()
        for sock, said in early:
            self._arrived(sock, said)

    def _end(self, tag: bytes) -> None:
        circle = self._circles.pop(tag, None)
        if circle is not None:
            circle.close()

    # ---- acceptor

    def _arrived(self, sock: Connection, said: Introduction) -> None:
        size = len(self._terms.contacts)
        if said.rank >= size or said.rank == self._terms.rank:
            self._refuse(sock, f"rank {said.rank} of {size} cannot dial this rank")
        elif said.kind is ConnectionKind.POST:
            self.post.take(sock, said)
        elif said.kind is not ConnectionKind.STAR:
            self.groups.take(sock, said)
        elif said.tag not in self._circles:
            self._park(sock, said)
        elif why_not := self._circles[said.tag].take(sock, said):
            self._refuse(sock, why_not)

    def _park(self, sock: Connection, said: Introduction) -> None:
        self._early.append((sock, said))
        if len(self._early) > _MOST_EARLY:
            self._refuse(self._early.popleft()[0], "dialed for a control group unknown here")

    def _refuse(self, sock: Connection, why: str) -> None:
        if self._door is None:
            sock.close()
        else:
            self._door.refuse(sock, why)

    def _starved(self, for_s: float, why: str) -> None:
        if for_s >= self._terms.peer_timeout_s:
            text = f"rank {self._terms.rank} cannot accept connections: {why}"
            for circle in self._circles.values():
                circle.give_up(RendezvousError(text))
            self.groups.starved(why)

"""The connections of a rank's connection manager in a world: acceptor, control groups and
groups.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from unisono.errors import AuthenticationError, RendezvousError
from unisono.rank_connections.control_group import ControlGroup
from unisono.rank_connections.control_messages import ControlMessage
from unisono.rank_connections.entered_groups import EnteredGroups
from unisono.rank_connections.peer_messages import PeerMessages
from unisono.rank_connections.world import World, WorldConfig
from unisono.transport import (
    NO_GROUP,
    Acceptor,
    Connection,
    ConnectionKind,
    EventLoop,
    Introduction,
    purpose_of,
)

_LEAVE_S = 1.0
_MOST_EARLY = 1024  # maximum of connections that wait until their control group exists on this rank


class WorldConnections:
    """A rank's acceptor of connections, control groups and groups, which share one event loop.

    Only the loop's thread uses `begin`, `leave`, `control_group`, `groups` and `peer_messages`;
    other threads use only the other methods.
    """

    def __init__(
        self, loop: EventLoop, listeners: Sequence[socket.socket], config: WorldConfig
    ) -> None:
        self._loop, self._listeners, self._config = loop, listeners, config
        self._world = World(loop=loop, config=config, send=self._send)
        self.groups = EnteredGroups(self._refuse)
        self.peer_messages = PeerMessages(
            self._world,
            self.groups,
            lambda message: self.groups.handle(message, self._world_group, self._send),
        )
        everybody = range(len(config.peer_infos))
        self._world_group = self._make_control_group(NO_GROUP, everybody, b"")
        self._control_groups = {NO_GROUP: self._world_group}
        self._early: deque[tuple[Connection, Introduction]] = deque()
        self._acceptor: Acceptor | None = None

    def _send(self, message: ControlMessage) -> None:
        self.peer_messages.send_message(message)

    def begin(self) -> None:
        """Starts accepting, and joins the world's control group."""
        self._world_group.begin(self._config.timeout_s)
        self._acceptor = Acceptor(
            self._loop,
            self._listeners,
            secret=self._config.secret,
            purpose=purpose_of(self._config.world, self._config.rank),
            security=self._config.security,
            arrived=self._arrived,
            accept_failed=self._accept_failed,
        )

    def wait(self) -> None:
        """Waits until this rank is connected to rank 0; on rank 0, waits until all ranks are
        connected. Raises a failure that occurs during the wait.
        """
        self._world_group.wait(self._config.timeout_s)

    def control_group(self, tag: bytes) -> ControlGroup:
        """Returns an existing control group. Only the loop's thread calls this."""
        return self._control_groups[tag]

    def form_control_group(
        self,
        tag: bytes,
        members: Sequence[int],
        rank0_data: bytes,
        timeout_s: float,
        watch: Callable[[], None],
    ) -> bytes:
        """Forms a control group of these ranks, which must all call this. Returns the data of the
        first rank."""
        control_group = self._make_control_group(tag, members, rank0_data)
        self._loop.call(lambda: self._begin(control_group))
        try:
            control_group.wait(timeout_s, watch)
        except AuthenticationError as error:
            # When the first rank joined the world, it proved that it knows the secret. So this
            # proof failed because the rank has ended.
            self.drop_control_group(tag)
            raise RendezvousError(str(error)) from error
        except BaseException:
            self.drop_control_group(tag)
            raise
        return control_group.rank0_data

    def drop_control_group(self, tag: bytes) -> None:
        """Leaves a control group and forgets it."""
        self._loop.call(lambda: self._end(tag))

    def leave(self) -> None:
        """Leaves all groups, waits a short time for the other ranks' acknowledgements, and ends the
        loop. Only the loop's thread calls this.
        """
        try:
            if self._acceptor is not None:
                self._acceptor.close()
            self.groups.leave_all()
            for control_group in self._control_groups.values():
                control_group.leave()
        finally:
            self._await_end(time.monotonic() + _LEAVE_S)

    def abandon(self) -> None:
        """Closes a forked child's copies of the connections that the loop does not watch."""
        self.groups.abandon()
        for sock, _ in self._early:
            sock.close()

    def _await_end(self, deadline: float) -> None:
        ended = all(control_group.ended() for control_group in self._control_groups.values())
        if ended or time.monotonic() > deadline:
            self._close()
        else:
            self._loop.later(0.002, lambda: self._await_end(deadline))

    def _close(self) -> None:
        try:
            for control_group in self._control_groups.values():
                control_group.close()
            for sock, _ in self._early:
                sock.close()
            self.peer_messages.close()
            for listener in self._listeners:
                listener.close()
        finally:
            self._loop.end()

    # ---- control groups

    def _make_control_group(
        self, tag: bytes, members: Sequence[int], rank0_data: bytes
    ) -> ControlGroup:
        return ControlGroup(
            self._world, tag, members, rank0_data, self.groups.handle, self.groups.server_lost
        )

    def _begin(self, control_group: ControlGroup) -> None:
        self._control_groups[control_group.tag] = control_group
        control_group.begin(self._config.peer_timeout_s)
        early, self._early = self._early, deque()
        for sock, introduction in early:
            self._arrived(sock, introduction)

    def _end(self, tag: bytes) -> None:
        control_group = self._control_groups.pop(tag, None)
        if control_group is not None:
            control_group.close()

    # ---- acceptor

    def _arrived(self, sock: Connection, introduction: Introduction) -> None:
        size = len(self._config.peer_infos)
        if introduction.rank >= size or introduction.rank == self._config.rank:
            self._refuse(sock, f"rank {introduction.rank} of {size} cannot dial this rank")
        elif introduction.kind is ConnectionKind.PEER:
            self.peer_messages.take(sock, introduction)
        elif introduction.kind is not ConnectionKind.CONTROL:
            self.groups.take(sock, introduction)
        elif introduction.tag not in self._control_groups:
            self._park(sock, introduction)
        elif why_not := self._control_groups[introduction.tag].take(sock, introduction):
            self._refuse(sock, why_not)

    def _park(self, sock: Connection, introduction: Introduction) -> None:
        self._early.append((sock, introduction))
        if len(self._early) > _MOST_EARLY:
            self._refuse(self._early.popleft()[0], "dialed for a control group unknown here")

    def _refuse(self, sock: Connection, why: str) -> None:
        if self._acceptor is None:
            sock.close()
        else:
            self._acceptor.refuse(sock, why)

    def _accept_failed(self, for_s: float, why: str) -> None:
        if for_s >= self._config.peer_timeout_s:
            text = f"rank {self._config.rank} cannot accept connections: {why}"
            for control_group in self._control_groups.values():
                control_group.give_up(RendezvousError(text))
            self.groups.accept_failed(why)

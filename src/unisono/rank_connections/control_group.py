"""A control group: ranks that inform each other of failures through one control server.

The control group of the world has all ranks. A group that replaces a failed group has its own
control group, whose server is on the group's rank 0.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from unisono.errors import AuthenticationError, RendezvousError, UnisonoError
from unisono.rank_connections.control_messages import ControlMessage, MessageKind
from unisono.rank_connections.control_server import ControlClient, ControlEndpoint, ControlServer
from unisono.rank_connections.world import World
from unisono.transport import ConnectionKind, Dial, DialFailure, Introduction, OneShotEvent

_WATCH_S = 0.02


class ControlGroup:
    """A control group of the world ranks `members`; the first member runs the server.

    The server sends `rank0_data` to the others. Any thread may call `wait`; the loop's thread calls
    the other methods.
    """

    def __init__(
        self,
        world: World,
        tag: bytes,
        members: Sequence[int],
        rank0_data: bytes,
        handle: Callable[[ControlMessage, ControlGroup], None],
        server_lost: Callable[[ControlGroup], None],
    ) -> None:
        """`server_lost` is called when the server has left or is lost. After that, messages go
        directly to the receiving ranks.
        """
        self.has_lost_server = False
        self._send_directly = world.send
        self.world = replace(world, send=self._send)
        """The world as the groups of this control group use it: `send` goes through the server."""
        self.lost: dict[int, str] = {}
        self.rank0_data = rank0_data
        self.tag = tag
        self._members, self._handle, self._server_lost = tuple(members), handle, server_lost
        self._endpoint: ControlEndpoint | None = None
        self._server: ControlServer | None = None
        self._dial: Dial | None = None
        self._complete = OneShotEvent()
        self._problem: UnisonoError | None = None

    def begin(self, host_s: float) -> None:
        """Starts the server on the first member. On other members, connects to the server, whose
        host may take `host_s` seconds to answer.
        """
        config, first = self.world.config, self._members[0]
        if config.rank == first:
            hosts = {rank: config.peer_infos[rank].addresses[0][0] for rank in self._members}
            self._endpoint = self._server = ControlServer(
                self.world.loop, first, hosts, config.peer_timeout_s, self.rank0_data, self._deliver
            )
            self._check_complete()
        else:
            introduction = Introduction(
                kind=ConnectionKind.CONTROL, rank=config.rank, pid=os.getpid(), tag=self.tag
            )
            self._dial = self.world.dial(
                first, 0, introduction, host_s=host_s, opened=self._connected, failed=self._refused
            )

    def wait(self, timeout_s: float, watch: Callable[[], None] | None = None) -> None:
        """Waits until this rank is connected to the server; on the server, waits until all ranks
        are connected. Raises a failure that occurs during the wait. Calls `watch`, which may raise,
        repeatedly during the wait.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = timeout_s if watch is None else _WATCH_S
        while not self._complete.wait(pause_s):
            if time.monotonic() >= deadline:
                break
            if watch is not None:
                watch()
        if self._problem is not None:
            raise self._problem
        if not self._complete.happened:
            whom = (
                f"rank {self._members[0]}"
                if self._server is None
                else f"ranks {self._server.missing}"
            )
            raise RendezvousError(
                f"rank {self.world.config.rank}: timeout after {timeout_s:g} s: {whom} "
                f"of {len(self._members)} had not connected"
            )

    def take(self, sock: socket.socket, introduction: Introduction) -> str:
        """Accepts a rank's connection to the server. Returns the reason if it is refused, else an
        empty text.
        """
        if self._server is None or not self._server.awaits(introduction.rank):
            return f"a second process claims to be rank {introduction.rank}"
        self._server.take(sock, introduction)
        self._check_complete()
        return ""

    def give_up(self, problem: UnisonoError) -> None:
        """Ends `wait` with an error. Does nothing if `wait` has ended."""
        if not self._complete.happened:
            self._problem = problem
            self._complete.set()

    def leave(self) -> None:
        """Leaves the control group without a failure."""
        if self._dial is not None:
            self._dial.cancel()
        if self._endpoint is not None:
            self._endpoint.leave()

    def ended(self) -> bool:
        """Returns True if the departure is acknowledged: on a client by the server, on the server
        by all clients.
        """
        return self._endpoint is None or self._endpoint.ended()

    def close(self) -> None:
        """Closes all connections."""
        if self._dial is not None:
            self._dial.cancel()
        if self._endpoint is not None:
            self._endpoint.close()

    def _connected(self, sock: socket.socket) -> None:
        config, first = self.world.config, self._members[0]
        self._endpoint = ControlClient(
            self.world.loop,
            sock,
            config.peer_timeout_s,
            rank=config.rank,
            server_rank=first,
            server_host=config.peer_infos[first].addresses[0][0],
            deliver=self._deliver,
            welcome=self._welcome,
            server_lost=self._lose_server,
        )

    def _lose_server(self) -> None:
        self.has_lost_server = True
        self._server_lost(self)

    def _welcome(self, rank0_data: bytes) -> None:
        self.rank0_data = rank0_data
        self._complete.set()

    def _refused(self, failed: DialFailure) -> None:
        text = f"rank {self.world.config.rank} cannot connect to {failed.text}"
        self.give_up(AuthenticationError(text) if failed.impostor else RendezvousError(text))

    def _check_complete(self) -> None:
        if self._server is not None and not self._server.missing:
            self._complete.set()

    def _send(self, message: ControlMessage) -> None:
        if self._endpoint is None or self._endpoint.send(message):
            return
        # The ranks of a group that includes the lost server detect the loss themselves, so they
        # need no message.
        first = self._members[0]
        if first not in self.lost or first not in message.to:
            self._send_directly(message)

    def _deliver(self, message: ControlMessage) -> None:
        if message.kind is MessageKind.LOST:
            text = message.body.decode(errors="replace")
            self.give_up(RendezvousError(f"{text}, before all ranks had connected"))
        self._handle(message, self)

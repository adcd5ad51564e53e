"""A control group: ranks that inform each other through one control server.

The control group of the world has all ranks. A group that replaces a failed one has its own control
group, whose server is on the group's rank 0.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from unisono.control.messages import ControlMessage, MessageKind
from unisono.control.server import ControlClient, ControlEndpoint, ControlServer
from unisono.control.world import World
from unisono.errors import AuthenticationError, RendezvousError, UnisonoError
from unisono.transport import ConnectionKind, Dial, DialFailure, Introduction, OneShotEvent

_WATCH_S = 0.02


class ControlGroup:
    """A control group of the world ranks `members`; the first member runs the server.

    The server sends `word` to the others. Any thread may call `wait`; the loop's thread calls the
    other methods.
    """

    def __init__(
        self,
        place: World,
        tag: bytes,
        members: Sequence[int],
        word: bytes,
        hear: Callable[[ControlMessage, ControlGroup], None],
        orphaned: Callable[[ControlGroup], None],
    ) -> None:
        """`orphaned` is called when the server has left or is lost. From then on, `place` sends
        messages directly to their ranks."""
        self.is_orphaned = False
        self._directly = place.tell
        self.place = replace(place, tell=self._tell)
        """The world, for the groups of this control group: its `tell` uses the server."""
        self.gone: dict[int, str] = {}
        self.word = word
        self.tag = tag
        self._members, self._hear, self._orphaned = tuple(members), hear, orphaned
        self._star: ControlEndpoint | None = None
        self._hub: ControlServer | None = None
        self._dial: Dial | None = None
        self._complete = OneShotEvent()
        self._problem: UnisonoError | None = None

    def begin(self, host_s: float) -> None:
        """Connects this rank, or starts the server; the server's host may take `host_s` to
        answer."""
        terms, first = self.place.terms, self._members[0]
        if terms.rank == first:
            hosts = {rank: terms.contacts[rank].addresses[0][0] for rank in self._members}
            self._star = self._hub = ControlServer(
                self.place.loop, first, hosts, terms.peer_timeout_s, self.word, self._deliver
            )
            self._check_complete()
        else:
            said = Introduction(
                kind=ConnectionKind.STAR, rank=terms.rank, pid=os.getpid(), tag=self.tag
            )
            self._dial = self.place.dial(
                first, 0, said, host_s=host_s, opened=self._connected, failed=self._refused
            )

    def wait(self, timeout_s: float, watch: Callable[[], None] | None = None) -> None:
        """Waits until this rank is connected; on the server, until all ranks are. Raises a failure
        that occurred meanwhile. `watch` is called meanwhile, and may raise."""
        deadline = time.monotonic() + timeout_s
        pause_s = timeout_s if watch is None else _WATCH_S
        while not self._complete.wait(pause_s):
            if time.monotonic() >= deadline:
                break
            if watch is not None:
                watch()
        if self._problem is not None:
            raise self._problem
        if not self._complete.told:
            whom = f"rank {self._members[0]}" if self._hub is None else f"ranks {self._hub.missing}"
            raise RendezvousError(
                f"rank {self.place.terms.rank}: after {timeout_s:g} s (timeout) {whom} "
                f"of {len(self._members)} had not connected"
            )

    def take(self, sock: socket.socket, said: Introduction) -> str:
        """Takes a rank's connection to the server; returns the reason for a refusal, else an empty
        text."""
        if self._hub is None or not self._hub.awaits(said.rank):
            return f"a second process claims to be rank {said.rank}"
        self._hub.take(sock, said)
        self._check_complete()
        return ""

    def give_up(self, problem: UnisonoError) -> None:
        """Ends `wait` with an error. Does nothing if `wait` has ended."""
        if not self._complete.told:
            self._problem = problem
            self._complete.tell()

    def bye(self) -> None:
        """Leaves in good order."""
        if self._dial is not None:
            self._dial.cancel()
        if self._star is not None:
            self._star.bye()

    def ended(self) -> bool:
        """Returns whether the other side has acknowledged the departure."""
        return self._star is None or self._star.ended()

    def close(self) -> None:
        """Closes all connections."""
        if self._dial is not None:
            self._dial.cancel()
        if self._star is not None:
            self._star.close()

    def _connected(self, sock: socket.socket) -> None:
        terms, first = self.place.terms, self._members[0]
        self._star = ControlClient(
            self.place.loop,
            sock,
            terms.peer_timeout_s,
            rank=terms.rank,
            hub=first,
            hub_host=terms.contacts[first].addresses[0][0],
            deliver=self._deliver,
            welcome=self._welcome,
            orphaned=self._lose_middle,
        )

    def _lose_middle(self) -> None:
        self.is_orphaned = True
        self._orphaned(self)

    def _welcome(self, word: bytes) -> None:
        self.word = word
        self._complete.tell()

    def _refused(self, failed: DialFailure) -> None:
        text = f"rank {self.place.terms.rank} cannot connect to {failed.text}"
        self.give_up(AuthenticationError(text) if failed.false else RendezvousError(text))

    def _check_complete(self) -> None:
        if self._hub is not None and not self._hub.missing:
            self._complete.tell()

    def _tell(self, message: ControlMessage) -> None:
        if self._star is None or self._star.tell(message):
            return
        # All ranks that share a group with a lost server have detected the loss themselves.
        first = self._members[0]
        if first not in self.gone or first not in message.to:
            self._directly(message)

    def _deliver(self, message: ControlMessage) -> None:
        if message.say is MessageKind.GONE:
            text = message.body.decode(errors="replace")
            self.give_up(RendezvousError(f"{text}, before all ranks had connected"))
        self._hear(message, self)

"""Ranks that hear of each other through one star: all of a world, or those of a group that succeeds
a failed one, whose rank 0 has the middle of it then."""

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
    """`members` are ranks of the world; the first has the middle. `word` is what that one tells the
    others. `wait` is for any thread, the rest for the loop's."""

    def __init__(
        self,
        place: World,
        tag: bytes,
        members: Sequence[int],
        word: bytes,
        hear: Callable[[ControlMessage, ControlGroup], None],
        orphaned: Callable[[ControlGroup], None],
    ) -> None:
        """`orphaned` is called when the middle has left, or is lost: then messages go directly, as
        `place` has it."""
        self.is_orphaned = False
        self._directly = place.tell
        self.place = replace(place, tell=self._tell)
        """As of the groups that hear of each other here."""
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
        """Takes this rank's place; the middle's host may take `host_s` to answer."""
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
        """Waits until the star is complete as seen from here; raises what came between. `watch`
        is called meanwhile, and may raise."""
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
        """A rank dials for its place in the star; returns why not, or nothing."""
        if self._hub is None or not self._hub.awaits(said.rank):
            return f"a second process says that it is rank {said.rank}"
        self._hub.take(sock, said)
        self._check_complete()
        return ""

    def give_up(self, problem: UnisonoError) -> None:
        """There is no use in waiting any more; nothing happens if it is over."""
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
        """Whether the others have taken note of that."""
        return self._star is None or self._star.ended()

    def close(self) -> None:
        """Closes what is open."""
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
        # Of a middle that is lost, all who share a group with it have heard by themselves.
        first = self._members[0]
        if first not in self.gone or first not in message.to:
            self._directly(message)

    def _deliver(self, message: ControlMessage) -> None:
        if message.say is MessageKind.GONE:
            text = message.body.decode(errors="replace")
            self.give_up(RendezvousError(f"{text}, before all ranks had connected"))
        self._hear(message, self)

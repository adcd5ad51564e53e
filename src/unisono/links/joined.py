"""A porter that joins a world: its door, its place in the star, its groups, on one loop."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence

from unisono.errors import AbortedError, AuthenticationError, RendezvousError, UnisonoError
from unisono.links.accepting import Door
from unisono.links.connection import Connection
from unisono.links.dialing import Dial, Failed
from unisono.links.groups import Groups
from unisono.links.introduction import Introduction, Kind, purpose_of
from unisono.links.loop import Loop
from unisono.links.messages import Message, Say
from unisono.links.place import Place, Terms
from unisono.links.star import Hub, Spoke, Star

_GOODBYE_S = 1.0


class Joined:
    """`begin` is for the loop's thread; `wait` and `goodbye` are for others."""

    def __init__(self, loop: Loop, listeners: Sequence[socket.socket], terms: Terms) -> None:
        self._loop, self._listeners, self._terms = loop, listeners, terms
        self._place = Place(loop=loop, terms=terms, tell=self._tell)
        self.groups = Groups(self._place, self._refuse)
        self._door: Door | None = None
        self._star: Star | None = None
        self._hub: Hub | None = None
        self._dial: Dial | None = None
        self._complete = threading.Event()
        self._problem: UnisonoError | None = None

    def begin(self) -> None:
        """Opens the door, and takes this rank's place in the star."""
        terms = self._terms
        if terms.rank == 0:
            hosts = [contact.addresses[0][0] for contact in terms.contacts]
            self._star = self._hub = Hub(
                self._loop, len(hosts), terms.peer_timeout_s, hosts, self._deliver
            )
            self._check_complete()
        else:
            said = Introduction(kind=Kind.STAR, rank=terms.rank, pid=os.getpid())
            self._dial = self._place.dial(
                0, 0, said, host_s=terms.timeout_s, opened=self._connected, failed=self._refused
            )
        self._door = Door(
            self._loop,
            self._listeners,
            secret=terms.secret,
            purpose=purpose_of(terms.world, terms.rank),
            security=terms.security,
            arrived=self._arrived,
            starved=self._starved,
        )

    def wait(self) -> None:
        """Waits until the star is complete as seen from here; raises what came between."""
        in_time = self._complete.wait(self._terms.timeout_s)
        if self._problem is not None:
            raise self._problem
        if not in_time:
            whom = "rank 0" if self._hub is None else f"ranks {self._hub.missing}"
            raise RendezvousError(
                f"rank {self._terms.rank}: after {self._terms.timeout_s:g} s {whom} of "
                f"{len(self._terms.contacts)} had not connected"
            )

    def goodbye(self) -> None:
        """Leaves everything in good order, as far as the others take part in that."""
        with contextlib.suppress(AbortedError):
            self._loop.run(self._leave, _GOODBYE_S)
            gone = threading.Event()
            self._loop.call(lambda: self._await_end(gone, time.monotonic() + _GOODBYE_S))
            gone.wait(2 * _GOODBYE_S)
            self._loop.run(self._end, _GOODBYE_S)

    def _leave(self) -> None:
        if self._dial is not None:
            self._dial.cancel()
        if self._door is not None:
            self._door.close()
        self.groups.leave_all()
        if self._star is not None:
            self._star.bye()

    def _await_end(self, gone: threading.Event, deadline: float) -> None:
        if self._star is None or self._star.ended() or time.monotonic() > deadline:
            gone.set()
        else:
            self._loop.later(0.002, lambda: self._await_end(gone, deadline))

    def _end(self) -> None:
        if self._star is not None:
            self._star.close()

    # ---- the star

    def _connected(self, sock: Connection) -> None:
        terms = self._terms
        self._star = Spoke(
            self._loop,
            sock,
            terms.peer_timeout_s,
            rank=terms.rank,
            hub_host=terms.contacts[0].addresses[0][0],
            deliver=self._deliver,
            welcome=self._complete.set,
        )

    def _refused(self, failed: Failed) -> None:
        text = f"rank {self._terms.rank} cannot connect to {failed.text}"
        self._give_up(AuthenticationError(text) if failed.false else RendezvousError(text))

    def _give_up(self, problem: UnisonoError) -> None:
        if not self._complete.is_set():
            self._problem = problem
            self._complete.set()

    def _check_complete(self) -> None:
        if self._hub is not None and not self._hub.missing:
            self._complete.set()

    def _tell(self, message: Message) -> None:
        if self._star is not None:
            self._star.tell(message)

    def _deliver(self, message: Message) -> None:
        if message.say is Say.GONE:
            text = message.body.decode(errors="replace")
            self._give_up(RendezvousError(f"{text}, before all ranks had connected"))
        self.groups.hear(message)

    # ---- the door

    def _arrived(self, sock: Connection, said: Introduction) -> None:
        size = len(self._terms.contacts)
        if said.rank >= size or said.rank == self._terms.rank:
            self._refuse(sock, f"no rank {said.rank} of {size} can dial here")
        elif said.kind is not Kind.STAR:
            self.groups.take(sock, said)
        elif self._hub is None or self._hub.has_seen(said.rank):
            self._refuse(sock, f"a second process says that it is rank {said.rank}")
        else:
            self._hub.take(sock, said)
            self._check_complete()

    def _refuse(self, sock: Connection, why: str) -> None:
        if self._door is None:
            sock.close()
        else:
            self._door.refuse(sock, why)

    def _starved(self, for_s: float, why: str) -> None:
        if for_s >= self._terms.peer_timeout_s:
            self._give_up(RendezvousError(f"rank {self._terms.rank} cannot let others in: {why}"))
            self.groups.starved(why)

"""Rank 0's side of a TCP bootstrap store: admits ranks and sends each rank the texts of all.

One thread serves all connections and waits for no single one. A client that sends nothing, or a
byte a second, is rejected when its time is up, and delays no other. A stranger is logged once and
does no harm.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time

from unisono.bootstrap import tcp_store_frames
from unisono.bootstrap.tcp_address import TcpAddress, keep_alive
from unisono.bootstrap.tcp_store_frames import Hello
from unisono.errors import AuthenticationError, RendezvousError
from unisono.transport import Connection, Handshake, Security

_log = logging.getLogger("unisono")

_GUEST_S = 10.0
"""Seconds in which a client must identify itself."""
_MOST_STRANGERS = 256
"""Most connections that have not identified themselves; beyond that, the oldest is closed."""
_FAREWELL_S = 0.5
"""After a failure, seconds for which rank 0 waits for ranks that do not know of the failure yet."""


class Guest:
    """A connection to rank 0, and its progress."""

    def __init__(self, connection: Connection, secret: bytes | None, security: Security) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.until = time.monotonic() + _GUEST_S
        self.hello: Hello | None = None
        self.text: bytes | None = None
        self.content = False
        """The client has all texts, or a refusal, and may disconnect."""
        self._security = security
        self._handshake: Handshake | None = None
        self._wanted = tcp_store_frames.HELLO_BYTES
        if secret is not None:
            self._handshake = Handshake(
                secret, dialing=False, purpose=tcp_store_frames.PURPOSE, tls=security.tls
            )
            self._wanted = self._handshake.wanted_bytes
        self._incoming = bytearray()
        self._outgoing = bytearray()

    @property
    def rank(self) -> int:
        """Rank that the client claims to be; -1 before its hello."""
        return -1 if self.hello is None else self.hello.rank

    @property
    def events(self) -> int:
        """Events to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)

    def send(self, data: bytes) -> None:
        """Sends as much as possible at once, and keeps the rest. Raises `OSError`."""
        self._outgoing += data
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                del self._outgoing[: self.connection.send(self._outgoing)]

    def receive(self) -> None:
        """Reads at most up to the end of the next message.

        Raises `AuthenticationError` for a message that a rank would not send, `OSError` when the
        connection ends.
        """
        with contextlib.suppress(BlockingIOError):
            while True:
                self._secure()
                more = self.connection.recv(max(self._wanted - len(self._incoming), 1))
                if not more:
                    raise ConnectionResetError("the client closed the connection")
                self._incoming += more
                if len(self._incoming) == self._wanted:
                    message = bytes(self._incoming)
                    self._incoming.clear()
                    self._take(message)

    def _secure(self) -> None:
        """Runs the TLS handshake when it is due. Raises `BlockingIOError` until that is done."""
        handshake = self._handshake
        if handshake is not None and handshake.wants_channel:
            key = handshake.tls_key
            channel = self.connection.secure(self._security, dialing=False, key=key)
            self.send(handshake.bind(channel))
            self._wanted = handshake.wanted_bytes

    def _take(self, message: bytes) -> None:
        if self._handshake is not None:
            self.send(self._handshake.take(message))
            self._wanted = self._handshake.wanted_bytes
            if self._handshake.done:
                self._handshake, self._wanted = None, tcp_store_frames.HELLO_BYTES
        elif self.hello is None:
            self.hello = Hello.unpack(message)
            self._wanted = self.hello.text_bytes
            if not self._wanted:
                self.text, self._wanted = b"", 1
        elif self.text is None:
            self.text, self._wanted = message, 1
        elif message == tcp_store_frames.ADMITTED and not self.content:
            self.content = True
        else:
            raise ConnectionResetError("the client sent a message that no rank sends")


class TcpStoreServer:
    """Rank 0's side of one exchange among `size` ranks until `deadline`. Close it after use."""

    def __init__(
        self,
        listeners: list[socket.socket],
        place: TcpAddress,
        secret: bytes | None,
        security: Security,
        *,
        size: int,
        deadline: float,
    ) -> None:
        self._place = place
        self._secret = secret
        self._security = security
        self._size = size
        self._deadline = deadline
        self._listeners = listeners
        self._strangers: dict[Guest, None] = {}
        """Not admitted yet, in order of arrival."""
        self._guests: dict[int, Guest] = {}
        self._logged: set[str] = set()
        self._turned_away = ""
        self._refusal: bytes | None = None
        self._refused: list[Guest] = []
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def exchange(self, mine: bytes, timeout_s: float) -> list[bytes]:
        """Returns the texts of all ranks, when all ranks have them. Raises `RendezvousError`."""
        try:
            while len(self._guests) < self._size - 1:
                self._require_time(
                    f"{self._place.text}: after {timeout_s:g} s (timeout) these ranks of "
                    f"{self._size} are missing: "
                    f"{sorted(set(range(1, self._size)) - set(self._guests))}"
                    + (self._turned_away or self._place.warning())
                )
                self._turn()
            self._close_door()
            texts = [mine, *(self._guests[rank].text or b"" for rank in range(1, self._size))]
            self._tell(
                tcp_store_frames.frame(tcp_store_frames.ALL, tcp_store_frames.pack_texts(texts))
            )
            while not all(guest.content for guest in self._guests.values()):
                late = sorted(rank for rank, guest in self._guests.items() if not guest.content)
                self._require_time(f"{self._place.text}: ranks {late} stopped in the bootstrap")
                self._turn()
            return texts
        except RendezvousError as error:
            with contextlib.suppress(RendezvousError):
                self._refuse(str(error))
            raise

    def close(self) -> None:
        """Closes all connections."""
        self._close_door()
        for guest in (*self._guests.values(), *self._refused):
            guest.connection.close()
        self._selector.close()

    def _close_door(self) -> None:
        """Stops accepting, so that the next bootstrap at this port starts with new clients."""
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners = []
        for guest in list(self._strangers):
            self._drop(guest)

    def _refuse(self, why: str) -> None:
        """Sends the reason of a failure to all admitted ranks, and for a moment to ranks that
        arrive late. Without it, those would try to reach rank 0 until their timeout."""
        self._refusal = tcp_store_frames.frame(tcp_store_frames.REFUSED, why.encode())
        self._tell(self._refusal)
        self._deadline = min(self._deadline, time.monotonic() + _FAREWELL_S)
        while self._listeners and len(self._guests) + len(self._refused) < self._size - 1:
            self._require_time(why)
            self._turn()

    def _require_time(self, problem: str) -> None:
        if time.monotonic() > self._deadline:
            raise RendezvousError(problem)

    def _turn(self) -> None:
        """Waits for events and handles them."""
        next_s = min([self._deadline, *(guest.until for guest in self._strangers)])
        for key, events in self._selector.select(max(next_s - time.monotonic(), 0) + 1e-3):
            if isinstance(key.data, Guest):
                self._serve(key.data, events)
            elif isinstance(key.fileobj, socket.socket):
                self._accept(key.fileobj)
        now = time.monotonic()
        for guest in [guest for guest in self._strangers if guest.until < now]:
            self._turn_away(guest, f"the client did not identify itself within {_GUEST_S:g} s")

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        # the client has disconnected, or descriptors are short: others wait in the queue
        except OSError:
            time.sleep(1e-3)
            return
        keep_alive(connection)
        guest = Guest(Connection.of(connection), self._secret, self._security)
        self._strangers[guest] = None
        self._selector.register(guest.connection, selectors.EVENT_READ, guest)
        if len(self._strangers) > _MOST_STRANGERS + self._size:
            self._turn_away(next(iter(self._strangers)), "too many other clients wait")

    def _serve(self, guest: Guest, events: int) -> None:
        if guest.connection.fileno() < 0:
            return  # rejected earlier in this round of events
        try:
            if events & selectors.EVENT_WRITE:
                guest.send(b"")
            if events & selectors.EVENT_READ:
                guest.receive()
            if guest in self._strangers and guest.text is not None:
                self._admit(guest)
            self._selector.modify(guest.connection, guest.events, guest)
        except (OSError, AuthenticationError) as error:
            if guest in self._strangers:
                self._turn_away(guest, str(error))
            elif not guest.content:
                raise RendezvousError(
                    f"{self._place.text}: rank {guest.rank} ({_name(guest)}) was lost during the "
                    f"bootstrap: {error}"
                ) from error
            else:  # the client has the texts and has disconnected
                self._selector.unregister(guest.connection)

    def _admit(self, guest: Guest) -> None:
        hello = guest.hello
        assert hello is not None
        if hello.job != self._place.digest():
            raise AuthenticationError("the client belongs to another job")
        del self._strangers[guest]
        problem = self._problem_with(hello)
        if self._refusal is not None:
            self._turn_down(guest, self._refusal)
        elif problem is not None:
            problem = f"{self._place.text}: {problem} ({_name(guest)})"
            self._turn_down(
                guest, tcp_store_frames.frame(tcp_store_frames.REFUSED, problem.encode())
            )
            raise RendezvousError(problem)
        else:
            self._guests[hello.rank] = guest
            guest.send(tcp_store_frames.frame(tcp_store_frames.ADMITTED))

    def _problem_with(self, hello: Hello) -> str | None:
        if hello.size != self._size:
            return f"rank {hello.rank} expects {hello.size} ranks, rank 0 expects {self._size}"
        if not 0 < hello.rank < self._size or hello.rank in self._guests:
            return f"two processes claim to be rank {hello.rank} of {self._size}"
        return None

    def _turn_down(self, guest: Guest, refusal: bytes) -> None:
        guest.content = True  # with an answer: it may disconnect
        self._refused.append(guest)
        guest.send(refusal)

    def _tell(self, message: bytes) -> None:
        for rank, guest in self._guests.items():
            try:
                guest.send(message)
                self._selector.modify(guest.connection, guest.events, guest)
            except OSError as error:
                lost = f"{self._place.text}: rank {rank} was lost during the bootstrap"
                raise RendezvousError(lost) from error

    def _turn_away(self, guest: Guest, why: str) -> None:
        name = _name(guest)
        address = name.rpartition(" port ")[0]
        self._drop(guest)
        self._turned_away = f" (the last rejected connection came from {name}: {why})"
        if address not in self._logged:
            self._logged.add(address)
            _log.warning(
                "%s: rejected a connection from %s (others from there are not logged): %s",
                self._place.text,
                name,
                why,
            )

    def _drop(self, guest: Guest) -> None:
        self._strangers.pop(guest)
        self._selector.unregister(guest.connection)
        guest.connection.close()


def _name(guest: Guest) -> str:
    try:
        address = guest.connection.getpeername()
    except OSError:
        return "unknown port -"
    return f"{address[0]} port {address[1]}"

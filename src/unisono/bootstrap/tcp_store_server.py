"""Rank 0's side of a TCP bootstrap store: admits ranks and sends each rank the texts of all.

One thread serves all connections and never waits for a single connection. A client that sends
nothing, or a byte a second, is rejected after a time limit and does not delay other clients. An
unknown client is logged once and otherwise ignored.
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

_HELLO_TIMEOUT_S = 10.0
"""Seconds in which a client must identify itself."""
_MOST_PENDING = 256
"""Maximum number of connections that have not identified themselves; at the limit, the oldest is
closed."""
_REFUSAL_S = 2.0
"""After a failure, seconds for which rank 0 waits for ranks that do not know of the failure yet."""


class Client:
    """A connection to rank 0, with the messages that have been received and those to be sent."""

    def __init__(self, connection: Connection, secret: bytes | None, security: Security) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.name = _name(connection)
        """Address of the client; a connection that has ended does not tell it any more."""
        self.until = time.monotonic() + _HELLO_TIMEOUT_S
        self.hello: Hello | None = None
        self.text: bytes | None = None
        self.is_answered = False
        """True if the client has all texts, or a refusal, and may disconnect."""
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
        """Selector events to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)

    def send(self, data: bytes) -> None:
        """Sends as much as possible without waiting, and keeps the remaining bytes for later.
        Raises `OSError`.
        """
        self._outgoing += data
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                del self._outgoing[: self.connection.send(self._outgoing)]

    def receive(self) -> None:
        """Reads the data that has arrived, and handles each complete message.

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
        """Runs the TLS handshake when it is required. Raises `BlockingIOError` until it is
        complete.
        """
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
        elif message == tcp_store_frames.ADMITTED and not self.is_answered:
            self.is_answered = True
        else:
            raise ConnectionResetError("the client sent a message that no rank sends")


class TcpStoreServer:
    """Rank 0's side of one exchange among `size` ranks until `deadline`. The caller closes the
    server after use.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        address: TcpAddress,
        secret: bytes | None,
        security: Security,
        *,
        size: int,
        deadline: float,
    ) -> None:
        self._address = address
        self._secret = secret
        self._security = security
        self._size = size
        self._deadline = deadline
        self._listeners = listeners
        self._pending: dict[Client, None] = {}
        """Clients that are not admitted yet, in order of arrival."""
        self._clients: dict[int, Client] = {}
        self._logged: set[str] = set()
        self._last_rejected = ""
        self._refusal: bytes | None = None
        self._refused: list[Client] = []
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def exchange(self, mine: bytes, timeout_s: float) -> list[bytes]:
        """Returns the texts of all ranks, after all ranks have received these texts. Raises
        `RendezvousError`.
        """
        try:
            while len(self._clients) < self._size - 1:
                self._require_time(
                    f"{self._address.text}: timeout after {timeout_s:g} s: these ranks of "
                    f"{self._size} are missing: "
                    f"{sorted(set(range(1, self._size)) - set(self._clients))}"
                    + (self._last_rejected or self._address.warning())
                )
                self._handle_events()
            self._stop_accepting()
            texts = [mine, *(self._clients[rank].text or b"" for rank in range(1, self._size))]
            self._send_all(
                tcp_store_frames.frame(tcp_store_frames.ALL, tcp_store_frames.pack_texts(texts))
            )
            while not all(client.is_answered for client in self._clients.values()):
                late = sorted(
                    rank for rank, client in self._clients.items() if not client.is_answered
                )
                self._require_time(f"{self._address.text}: ranks {late} stopped in the bootstrap")
                self._handle_events()
            return texts
        except RendezvousError as error:
            with contextlib.suppress(RendezvousError):
                self._refuse(str(error))
            raise

    def close(self) -> None:
        """Closes all connections."""
        self._stop_accepting()
        for client in (*self._clients.values(), *self._refused):
            client.connection.close()
        self._selector.close()

    def _stop_accepting(self) -> None:
        """Stops accepting, so that the next bootstrap at this port starts with new clients."""
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners = []
        for client in list(self._pending):
            self._drop(client)

    def _refuse(self, why: str) -> None:
        """Sends the reason of a failure to all admitted ranks, and for a moment to ranks that
        arrive late. Without this message, late ranks would try to reach rank 0 until their
        timeout."""
        self._refusal = tcp_store_frames.frame(tcp_store_frames.REFUSED, why.encode())
        for client in self._clients.values():
            if not client.is_answered:
                with contextlib.suppress(OSError):  # this rank is lost
                    self._refuse_client(client, self._refusal)
        self._deadline = min(self._deadline, time.monotonic() + _REFUSAL_S)
        while self._listeners and len(self._clients) + len(self._refused) < self._size - 1:
            self._require_time(why)
            self._handle_events()

    def _require_time(self, problem: str) -> None:
        if time.monotonic() > self._deadline:
            raise RendezvousError(problem)

    def _handle_events(self) -> None:
        """Waits for events and handles them."""
        next_s = min([self._deadline, *(client.until for client in self._pending)])
        for key, events in self._selector.select(max(next_s - time.monotonic(), 0) + 1e-3):
            if isinstance(key.data, Client):
                self._serve(key.data, events)
            elif isinstance(key.fileobj, socket.socket):
                self._accept(key.fileobj)
        now = time.monotonic()
        for client in [client for client in self._pending if client.until < now]:
            self._reject(
                client, f"the client did not identify itself within {_HELLO_TIMEOUT_S:g} s"
            )

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        # the client has disconnected, or no descriptor is free; the next client waits in the queue
        except OSError:
            time.sleep(1e-3)
            return
        keep_alive(connection)
        client = Client(Connection.of(connection), self._secret, self._security)
        self._pending[client] = None
        self._selector.register(client.connection, selectors.EVENT_READ, client)
        if len(self._pending) > _MOST_PENDING + self._size:
            self._reject(next(iter(self._pending)), "too many other clients wait")

    def _serve(self, client: Client, events: int) -> None:
        if client.connection.fileno() < 0:
            return  # rejected while an earlier event of the same `select` was handled
        try:
            if events & selectors.EVENT_WRITE:
                client.send(b"")
            if events & selectors.EVENT_READ:
                client.receive()
            if client in self._pending and client.text is not None:
                self._admit(client)
            self._selector.modify(client.connection, client.events, client)
        except (OSError, AuthenticationError) as error:
            if client in self._pending:
                self._reject(client, str(error))
            elif not client.is_answered:
                raise RendezvousError(
                    f"{self._address.text}: rank {client.rank} ({client.name}) was lost during "
                    f"the bootstrap: {error}"
                ) from error
            else:  # the client has the texts and has disconnected
                self._selector.unregister(client.connection)

    def _admit(self, client: Client) -> None:
        hello = client.hello
        assert hello is not None
        if hello.job != self._address.digest():
            raise AuthenticationError("the client belongs to another job")
        del self._pending[client]
        problem = self._problem_with(hello)
        if self._refusal is not None or problem is not None:
            self._refused.append(client)
        if self._refusal is not None:
            self._refuse_client(client, self._refusal)
        elif problem is not None:
            problem = f"{self._address.text}: {problem} ({client.name})"
            self._refuse_client(
                client, tcp_store_frames.frame(tcp_store_frames.REFUSED, problem.encode())
            )
            raise RendezvousError(problem)
        else:
            self._clients[hello.rank] = client
            client.send(tcp_store_frames.frame(tcp_store_frames.ADMITTED))

    def _problem_with(self, hello: Hello) -> str | None:
        if hello.size != self._size:
            return f"rank {hello.rank} expects {hello.size} ranks, rank 0 expects {self._size}"
        if not 0 < hello.rank < self._size or hello.rank in self._clients:
            return f"two processes claim to be rank {hello.rank} of {self._size}"
        return None

    def _refuse_client(self, client: Client, refusal: bytes) -> None:
        client.is_answered = True  # from now on the client may disconnect
        client.send(refusal)
        self._selector.modify(client.connection, client.events, client)

    def _send_all(self, message: bytes) -> None:
        for rank, client in self._clients.items():
            try:
                client.send(message)
                self._selector.modify(client.connection, client.events, client)
            except OSError as error:
                lost = f"{self._address.text}: rank {rank} was lost during the bootstrap"
                raise RendezvousError(lost) from error

    def _reject(self, client: Client, why: str) -> None:
        name = client.name
        address = name.rpartition(" port ")[0]
        self._drop(client)
        self._last_rejected = f" (the last rejected connection came from {name}: {why})"
        if address not in self._logged:
            self._logged.add(address)
            _log.warning(
                "%s: rejected a connection from %s (others from there are not logged): %s",
                self._address.text,
                name,
                why,
            )

    def _drop(self, client: Client) -> None:
        self._pending.pop(client)
        self._selector.unregister(client.connection)
        client.connection.close()


def _name(connection: Connection) -> str:
    try:
        address = connection.getpeername()
    except OSError:
        return "unknown port -"
    return f"{address[0]} port {address[1]}"

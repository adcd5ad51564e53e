"""Sets up a connection without blocking: handshake, then introduction."""

from __future__ import annotations

import errno
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from unisono.errors import AuthenticationError
from unisono.transport.connection import Connection
from unisono.transport.event_loop import READ, EventLoop
from unisono.transport.handshake import Handshake
from unisono.transport.introduction import INTRODUCTION_BYTES, Introduction, unpack
from unisono.transport.security import Security

LEAST_WAIT_S = 1.0
"""Minimum seconds that a listener waits for the data of an unknown client, even while other clients
wait.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupFailure:
    """Failure of a connection setup.

    `impostor` is True if the other end failed the authentication, False if it was lost. `slow` is
    True if the setup took so long that the listener may have ended it.
    """

    text: str
    impostor: bool
    slow: bool


class _ConnectionSetup(ABC):
    """Reads messages of known lengths and answers each message. Calls either `opened` or `failed`
    once at the end, unless it is cancelled.
    """

    def __init__(
        self,
        loop: EventLoop,
        sock: Connection,
        handshake: Handshake,
        time_s: float,
        *,
        security: Security,
    ) -> None:
        self.sock = sock
        self.handshake = handshake
        self._security = security
        self._loop = loop
        self._data = b""
        self._over = False
        self._started_at = time.monotonic()
        self._timer = loop.later(time_s, lambda: self.give_up(f"sent too little in {time_s:g} s"))
        loop.watch(sock, READ, self._read)

    @property
    def slow(self) -> bool:
        """True if the setup has taken so long that the listener may have stopped waiting. On a busy
        machine, either end may be late.
        """
        return time.monotonic() - self._started_at >= LEAST_WAIT_S

    def give_up(self, why: str, *, impostor: bool = False) -> None:
        """Closes the connection and reports a failure."""
        if not self._over:
            self._end()
            self.sock.close()
            self.failed(SetupFailure(text=why, impostor=impostor, slow=self.slow))

    def cancel(self) -> None:
        """Closes the connection without a report."""
        if not self._over:
            self._end()
            self.sock.close()

    @abstractmethod
    def wanted_bytes(self) -> int:
        """Returns the length of the next message. 0: the setup is complete."""

    @abstractmethod
    def take(self, message: bytes) -> bytes:
        """Handles a message; returns the bytes to send."""

    @abstractmethod
    def opened(self) -> None:
        """Called when the connection is authenticated. The callee then owns the socket."""

    @abstractmethod
    def failed(self, failure: SetupFailure) -> None:
        """Called when the setup has failed and the connection is closed."""

    def lost(self) -> None:
        """Handles a connection closed by the other end."""
        self.give_up(self.handshake.greeting_error or "closed the connection during the handshake")

    def send(self, data: bytes) -> None:
        """Sends a message. A new connection's buffer has room for all messages of a setup."""
        if self.sock.send(data) != len(data):
            raise ConnectionResetError("takes no more bytes")

    def _read(self) -> None:
        try:
            while self.handshake.wants_channel or self.wanted_bytes():
                if self.handshake.wants_channel:
                    self._secure()
                more = self.sock.recv(self.wanted_bytes() - len(self._data))
                if not more:
                    raise ConnectionResetError
                self._data += more
                if len(self._data) < self.wanted_bytes():
                    continue
                message, self._data = self._data, b""
                answer = self.take(message)
                if answer:
                    self.send(answer)
        except BlockingIOError:
            return
        except AuthenticationError as error:
            self.give_up(str(error), impostor=True)
        except OSError as error:
            if error.errno == errno.EBADMSG:
                self.give_up(f"TLS: {error.strerror}", impostor=True)
            else:
                self.lost()
        else:
            self._end()
            self.opened()

    def _secure(self) -> None:
        """Continues the TLS handshake. Raises `BlockingIOError` while the other end must send
        first.
        """
        handshake = self.handshake
        channel = self.sock.secure(self._security, dialing=handshake.dialing, key=handshake.tls_key)
        self.send(handshake.bind(channel))

    def _end(self) -> None:
        self._over = True
        self._timer.cancel()
        self._loop.unwatch(self.sock)


class IncomingSetup(_ConnectionSetup):
    """The listener's side of a setup."""

    def __init__(
        self,
        loop: EventLoop,
        sock: Connection,
        handshake: Handshake,
        time_s: float,
        *,
        security: Security,
        host: str,
        opened: Callable[[IncomingSetup, Introduction], None],
        failed: Callable[[IncomingSetup, SetupFailure], None],
    ) -> None:
        self.host = host
        self._introduction: Introduction | None = None
        self._opened, self._failed = opened, failed
        super().__init__(loop, sock, handshake, time_s, security=security)

    def wanted_bytes(self) -> int:
        if self._introduction is not None:
            return 0
        return self.handshake.wanted_bytes or INTRODUCTION_BYTES

    def take(self, message: bytes) -> bytes:
        if not self.handshake.done:
            return self.handshake.take(message)
        self._introduction = unpack(message, self.handshake.key)
        return b""

    def opened(self) -> None:
        assert self._introduction is not None
        self._opened(self, self._introduction)

    def failed(self, failure: SetupFailure) -> None:
        self._failed(self, failure)


class OutgoingSetup(_ConnectionSetup):
    """The dialer's side of a setup, on a connected socket."""

    def __init__(
        self,
        loop: EventLoop,
        sock: Connection,
        handshake: Handshake,
        time_s: float,
        *,
        security: Security,
        introduction: Introduction,
        opened: Callable[[Connection], None],
        failed: Callable[[SetupFailure], None],
    ) -> None:
        self._introduction = introduction
        self._opened, self._failed = opened, failed
        super().__init__(loop, sock, handshake, time_s, security=security)

    def begin(self) -> None:
        """Sends the first message."""
        try:
            self.send(self.handshake.opening)
        except OSError:
            self.lost()

    def wanted_bytes(self) -> int:
        return self.handshake.wanted_bytes

    def take(self, message: bytes) -> bytes:
        answer = self.handshake.take(message)
        if not self.handshake.done:
            return answer
        return self._introduction.pack(self.handshake.key)

    def lost(self) -> None:
        if self.handshake.greeted:
            why = "closed the connection after our proof (do all ranks have the same job secret?)"
            self.give_up(why, impostor=not self.slow)
        else:
            super().lost()

    def opened(self) -> None:
        self._opened(self.sock)

    def failed(self, failure: SetupFailure) -> None:
        self._failed(failure)

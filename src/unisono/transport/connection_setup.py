"""A connection on its way from a stranger to a peer: handshake, then introduction. Never blocks."""

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

LEAST_PATIENCE_S = 1.0
"""So long a listener waits at least for what a stranger has to say, even where others wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupFailure:
    """How an opening ended: what went wrong, whether the other end was found out to be false rather
    than merely lost, and whether it took so long that patience may have ended instead."""

    text: str
    false: bool
    slow: bool


class _ConnectionSetup(ABC):
    """Reads messages of known lengths, answers each; ends in exactly one of its two outcomes."""

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
        self._begun = time.monotonic()
        self._alarm = loop.later(time_s, lambda: self.give_up(f"said too little in {time_s:g} s"))
        loop.watch(sock, READ, self._read)

    @property
    def slow(self) -> bool:
        """Whether the listener may have lost patience by now: on a busy machine either end may be
        late."""
        return time.monotonic() - self._begun >= LEAST_PATIENCE_S

    def give_up(self, why: str, *, false: bool = False) -> None:
        """Closes the connection."""
        if not self._over:
            self._end()
            self.sock.close()
            self.failed(SetupFailure(text=why, false=false, slow=self.slow))

    def cancel(self) -> None:
        """Closes the connection and tells nobody."""
        if not self._over:
            self._end()
            self.sock.close()

    @abstractmethod
    def wanted_bytes(self) -> int:
        """How long the next message is. 0: all is said."""

    @abstractmethod
    def take(self, message: bytes) -> bytes:
        """Takes it; returns what to send."""

    @abstractmethod
    def opened(self) -> None:
        """The connection is proved; the socket is the receiver's."""

    @abstractmethod
    def failed(self, broken: SetupFailure) -> None:
        """It is not, and is closed."""

    def lost(self) -> None:
        """The other end closed the connection."""
        self.give_up(
            self.handshake.objection or "closed the connection in the middle of the handshake"
        )

    def send(self, data: bytes) -> None:
        """Sends some bytes; a new connection has room for all that are ever sent here."""
        if self.sock.send(data) != len(data):
            raise ConnectionResetError("takes no bytes")

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
            self.give_up(str(error), false=True)
        except OSError as error:
            if error.errno == errno.EBADMSG:
                self.give_up(f"TLS: {error.strerror}", false=True)
            else:
                self.lost()
        else:
            self._end()
            self.opened()

    def _secure(self) -> None:
        """Raises `BlockingIOError` if the other end has to say something first."""
        handshake = self.handshake
        channel = self.sock.secure(self._security, dialing=handshake.dialing, key=handshake.tls_key)
        self.send(handshake.bind(channel))

    def _end(self) -> None:
        self._over = True
        self._alarm.cancel()
        self._loop.unwatch(self.sock)


class IncomingSetup(_ConnectionSetup):
    """The listener's side of it."""

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

    def failed(self, broken: SetupFailure) -> None:
        self._failed(self, broken)


class OutgoingSetup(_ConnectionSetup):
    """The dialer's side of it, on a socket that is connected."""

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
        """Says the first word."""
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
            why = "closed the connection on our proof (does every rank have the same job secret?)"
            self.give_up(why, false=not self.slow)
        else:
            super().lost()

    def opened(self) -> None:
        self._opened(self.sock)

    def failed(self, broken: SetupFailure) -> None:
        self._failed(broken)

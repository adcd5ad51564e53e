"""A connected socket that can turn to TLS, and is read and written then as it was before."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from unisono.native import TlsSession
from unisono.transport.security import Security

_MOST_SENT_BYTES = 1 << 17
_Result = TypeVar("_Result")


class Connection(socket.socket):
    """What `recv`, `send` and `sendall` take and give is clear text. `tls` is None, or what goes
    with the descriptor to whoever gets that.

    A `send` that raises `BlockingIOError` has to be repeated with the same bytes, or more of them:
    they may be on their way already.
    """

    tls: TlsSession | None = None

    @classmethod
    def of(cls, sock: socket.socket) -> Connection:
        """The same socket; `sock` is of no use any more."""
        timeout_s = sock.gettimeout()
        connection = cls(fileno=sock.detach())
        connection.settimeout(timeout_s)
        return connection

    def secure(self, security: Security, *, dialing: bool, key: bytes) -> bytes:
        """Goes on with the handshake of TLS; once it is done, returns the number of this channel,
        which both ends know and no other channel has.

        Raises `BlockingIOError` if the other end has to say something first, `AuthenticationError`
        if it is not whom it should be.
        """
        if self.tls is None:
            assert security.context is not None
            self.tls = TlsSession(security.context, self.fileno(), dialing, key)
        if not self.tls.shake():
            raise BlockingIOError
        return self.tls.binding()

    def await_more(self, deadline: float) -> None:
        """Returns when something has come. Raises `TimeoutError` at the deadline, which is a time
        of `time.monotonic`."""
        self._wait(select.POLLIN, deadline)

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        tls = self.tls
        if tls is None:
            return super().recv(bufsize, flags)
        return self._patiently(select.POLLIN, lambda: tls.recv(bufsize))

    def send(self, data: bytes | bytearray, flags: int = 0, /) -> int:  # type: ignore[override]
        tls = self.tls
        if tls is None:
            return super().send(data, flags)
        some = bytes(data[:_MOST_SENT_BYTES])
        try:
            return self._patiently(select.POLLOUT, lambda: tls.send(some)) if some else 0
        except (BrokenPipeError, ConnectionResetError):
            with contextlib.suppress(BlockingIOError):
                tls.recv(1)  # raises what the other end said before it closed the connection
            raise

    def sendall(self, data: bytes, flags: int = 0, /) -> None:  # type: ignore[override]
        if self.tls is None:
            super().sendall(data, flags)
            return
        while data:
            data = data[self.send(data) :]

    def _patiently(self, event: int, attempt: Callable[[], _Result]) -> _Result:
        """Tries again until the socket's timeout, as a socket does."""
        timeout_s = self.gettimeout()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                return attempt()
            except BlockingIOError:
                if timeout_s == 0:
                    raise
            self._wait(event, deadline)

    def _wait(self, event: int, deadline: float | None) -> None:
        poll = select.poll()
        poll.register(self, event)
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and (left_s <= 0 or not poll.poll(left_s * 1000)):
            raise TimeoutError("timed out")
        if left_s is None:
            poll.poll()

"""A connected socket that can start TLS. Reads and writes are the same with and without TLS."""

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
    """A socket that transfers clear text, or TLS once `secure` has succeeded.

    `tls` is None without TLS. The new owner of the descriptor also needs `tls`.

    A `send` that raises `BlockingIOError` must be repeated with the same bytes, or more: TLS may
    have sent some of them.
    """

    tls: TlsSession | None = None

    @classmethod
    def of(cls, sock: socket.socket) -> Connection:
        """Converts a socket; `sock` is unusable afterwards."""
        timeout_s = sock.gettimeout()
        connection = cls(fileno=sock.detach())
        connection.settimeout(timeout_s)
        return connection

    def secure(self, security: Security, *, dialing: bool, key: bytes) -> bytes:
        """Continues the TLS handshake; when it is done, returns the channel binding.

        Both ends know this value, which is unique to the channel. Raises `BlockingIOError` while
        the other end must send first, `AuthenticationError` if the other end is not the expected
        one.
        """
        if self.tls is None:
            assert security.context is not None
            self.tls = TlsSession(security.context, self.fileno(), dialing, key)
        if not self.tls.shake():
            raise BlockingIOError
        return self.tls.binding()

    def await_more(self, deadline: float) -> None:
        """Returns when data has arrived. Raises `TimeoutError` at the deadline, a time of
        `time.monotonic`."""
        self._wait(select.POLLIN, deadline)

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        tls = self.tls
        if tls is None:
            return super().recv(bufsize, flags)
        return self._with_timeout(select.POLLIN, lambda: tls.recv(bufsize))

    def send(self, data: bytes | bytearray, flags: int = 0, /) -> int:  # type: ignore[override]
        tls = self.tls
        if tls is None:
            return super().send(data, flags)
        some = bytes(data[:_MOST_SENT_BYTES])
        try:
            return self._with_timeout(select.POLLOUT, lambda: tls.send(some)) if some else 0
        except (BrokenPipeError, ConnectionResetError):
            with contextlib.suppress(BlockingIOError):
                # raises the error that the other end sent before it closed the connection
                tls.recv(1)
            raise

    def sendall(self, data: bytes, flags: int = 0, /) -> None:  # type: ignore[override]
        if self.tls is None:
            super().sendall(data, flags)
            return
        while data:
            data = data[self.send(data) :]

    def _with_timeout(self, event: int, attempt: Callable[[], _Result]) -> _Result:
        """Repeats an attempt until it succeeds or the socket's timeout passes, as a plain socket
        does.
        """
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

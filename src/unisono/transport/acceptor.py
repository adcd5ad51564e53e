"""Accepts connections. Limits the number of connections that are not authenticated, and the time
for which it keeps them.
"""

from __future__ import annotations

import errno
import logging
import resource
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

from unisono.transport.connection import Connection
from unisono.transport.connection_setup import LEAST_WAIT_S, IncomingSetup, SetupFailure
from unisono.transport.event_loop import READ, EventLoop
from unisono.transport.handshake import Handshake
from unisono.transport.introduction import Introduction
from unisono.transport.security import Security

HANDSHAKE_S = 5.0
MOST_PENDING = 128
_PAUSE_S = 0.1
_LOG_EACH_S = 60.0
_MOST_LOGGED = 64

_log = logging.getLogger("unisono")


class SparingLog:
    """A log of warnings, at most one per key and minute, so that unknown clients cannot fill the
    disk. Limits the number of keys.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def warn(self, key: str, text: str) -> None:
        """Logs a warning, unless a warning with this key was logged within the last minute."""
        now = time.monotonic()
        self._last = {k: at for k, at in self._last.items() if now - at < _LOG_EACH_S}
        if key not in self._last and len(self._last) < _MOST_LOGGED:
            self._last[key] = now
            _log.warning("%s (repetitions within a minute are not logged)", text)


class Acceptor:
    """Accepts connections on all listeners.

    `arrived` receives each authenticated connection and owns its socket. `accept_failed` is called
    with the seconds for which accepting has failed, and the reason.
    """

    def __init__(
        self,
        loop: EventLoop,
        listeners: Sequence[socket.socket],
        *,
        secret: bytes,
        purpose: bytes,
        security: Security,
        arrived: Callable[[Connection, Introduction], None],
        accept_failed: Callable[[float, str], None],
    ) -> None:
        self._loop, self._listeners = loop, listeners
        self._secret, self._purpose, self._security = secret, purpose, security
        self._arrived, self._accept_failed = arrived, accept_failed
        self._pending: dict[IncomingSetup, float] = {}  # time of arrival of each; oldest first
        self._log = SparingLog()
        self._open = True
        self._failing_since: float | None = None
        self._listen()

    def close(self) -> None:
        """Stops accepting. The caller closes the listeners."""
        self._open = False
        for listener in self._listeners:
            self._loop.unwatch(listener)
        for setup in list(self._pending):
            setup.cancel()
        self._pending.clear()

    def refuse(self, sock: socket.socket, why: str) -> None:
        """Closes an authenticated connection that is not acceptable, and logs the reason."""
        try:
            host = str(sock.getpeername()[0])
        except OSError:
            host = "an unknown host"
        sock.close()
        self._log.warn(host, f"refused a connection from {host}: {why}")

    def _listen(self) -> None:
        if self._open:
            for listener in self._listeners:
                self._loop.watch(listener, READ, partial(self._accept, listener))

    def _pause(self, for_s: float) -> None:
        """Stops accepting for a while, since a listener that is always ready would keep the thread
        busy."""
        for listener in self._listeners:
            self._loop.unwatch(listener)
        self._loop.later(for_s, self._listen)

    def _accept(self, listener: socket.socket) -> None:
        if not self._make_room():
            return
        try:
            sock, address = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._no_descriptors(error)
            return
        self._failing_since = None
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = Handshake(
            self._secret, dialing=False, purpose=self._purpose, tls=self._security.tls
        )
        setup = IncomingSetup(
            self._loop,
            Connection.of(sock),
            handshake,
            HANDSHAKE_S,
            security=self._security,
            host=str(address[0]),
            opened=self._authenticated,
            failed=self._rejected,
        )
        self._pending[setup] = time.monotonic()

    def _make_room(self) -> bool:
        """Closes the oldest slow connection that is not authenticated, to make room for ranks of
        the job, which authenticate at once."""
        if len(self._pending) < MOST_PENDING:
            return True
        oldest, since = next(iter(self._pending.items()))
        waited_s = time.monotonic() - since
        if waited_s < LEAST_WAIT_S:
            self._pause(min(LEAST_WAIT_S - waited_s, _PAUSE_S))
            return False
        oldest.give_up("sent too little while others waited")
        return True

    def _no_descriptors(self, error: OSError) -> None:
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        short = error.errno in (errno.EMFILE, errno.ENFILE)
        what = f"no descriptors are left (ulimit -n is {limit})" if short else error.strerror
        self._log.warn("", f"cannot accept connections of other hosts: {what}")
        self._accept_failed(time.monotonic() - self._failing_since, str(what))
        self._pause(_PAUSE_S)

    def _authenticated(self, setup: IncomingSetup, introduction: Introduction) -> None:
        self._pending.pop(setup, None)
        self._arrived(setup.sock, introduction)

    def _rejected(self, setup: IncomingSetup, failure: SetupFailure) -> None:
        self._pending.pop(setup, None)
        self._log.warn(setup.host, f"refused a connection from {setup.host}: {failure.text}")

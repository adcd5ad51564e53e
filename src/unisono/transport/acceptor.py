"""The door: who connects is a stranger until proved, and strangers are few and short-lived."""

from __future__ import annotations

import errno
import logging
import resource
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

from unisono.transport.connection import Connection
from unisono.transport.connection_setup import LEAST_PATIENCE_S, IncomingSetup, SetupFailure
from unisono.transport.event_loop import READ, EventLoop
from unisono.transport.handshake import Handshake
from unisono.transport.introduction import Introduction
from unisono.transport.security import Security

STRANGER_S = 5.0
MOST_STRANGERS = 128
_PAUSE_S = 0.1
_LOG_EACH_S = 60.0
_MOST_LOGGED = 64

_log = logging.getLogger("unisono")


class SparingLog:
    """Says a thing once a minute for each key, and for few keys: strangers do not fill the disk."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def warn(self, key: str, text: str) -> None:
        """Logs it, unless that was done lately."""
        now = time.monotonic()
        self._last = {k: at for k, at in self._last.items() if now - at < _LOG_EACH_S}
        if key not in self._last and len(self._last) < _MOST_LOGGED:
            self._last[key] = now
            _log.warning("%s (if it happens again within a minute, that is not logged)", text)


class Acceptor:
    """Accepts on all listeners. `arrived` gets the proved ones and owns their sockets from there;
    `starved` hears for how many seconds nobody could be accepted, and why."""

    def __init__(
        self,
        loop: EventLoop,
        listeners: Sequence[socket.socket],
        *,
        secret: bytes,
        purpose: bytes,
        security: Security,
        arrived: Callable[[Connection, Introduction], None],
        starved: Callable[[float, str], None],
    ) -> None:
        self._loop, self._listeners = loop, listeners
        self._secret, self._purpose, self._security = secret, purpose, security
        self._arrived, self._starved = arrived, starved
        self._strangers: dict[IncomingSetup, float] = {}  # in the order of their coming
        self._log = SparingLog()
        self._open = True
        self._full_since: float | None = None
        self._listen()

    def close(self) -> None:
        """Lets nobody in any more. The listeners are the caller's."""
        self._open = False
        for listener in self._listeners:
            self._loop.unwatch(listener)
        for stranger in list(self._strangers):
            stranger.cancel()
        self._strangers.clear()

    def refuse(self, sock: socket.socket, why: str) -> None:
        """Closes a connection that was proved but makes no sense."""
        try:
            host = str(sock.getpeername()[0])
        except OSError:
            host = "somebody who has gone already"
        sock.close()
        self._log.warn(host, f"refused a connection from {host}: {why}")

    def _listen(self) -> None:
        if self._open:
            for listener in self._listeners:
                self._loop.watch(listener, READ, partial(self._accept, listener))

    def _pause(self, for_s: float) -> None:
        """A listener that is always ready must not keep the thread busy for nothing."""
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
        self._full_since = None
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = Handshake(
            self._secret, dialing=False, purpose=self._purpose, tls=self._security.tls
        )
        stranger = IncomingSetup(
            self._loop,
            Connection.of(sock),
            handshake,
            STRANGER_S,
            security=self._security,
            host=str(address[0]),
            opened=self._proved,
            failed=self._unproved,
        )
        self._strangers[stranger] = time.monotonic()

    def _make_room(self) -> bool:
        """Ranks of the job prove themselves at once; who takes long makes room for them."""
        if len(self._strangers) < MOST_STRANGERS:
            return True
        oldest, came = next(iter(self._strangers.items()))
        stayed_s = time.monotonic() - came
        if stayed_s < LEAST_PATIENCE_S:
            self._pause(min(LEAST_PATIENCE_S - stayed_s, _PAUSE_S))
            return False
        oldest.give_up("said too little while others waited")
        return True

    def _no_descriptors(self, error: OSError) -> None:
        if self._full_since is None:
            self._full_since = time.monotonic()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        short = error.errno in (errno.EMFILE, errno.ENFILE)
        what = f"no descriptors are left (ulimit -n is {limit})" if short else error.strerror
        self._log.warn("", f"cannot accept connections of other hosts: {what}")
        self._starved(time.monotonic() - self._full_since, str(what))
        self._pause(_PAUSE_S)

    def _proved(self, stranger: IncomingSetup, introduction: Introduction) -> None:
        self._strangers.pop(stranger, None)
        self._arrived(stranger.sock, introduction)

    def _unproved(self, stranger: IncomingSetup, broken: SetupFailure) -> None:
        self._strangers.pop(stranger, None)
        self._log.warn(stranger.host, f"refused a connection from {stranger.host}: {broken.text}")

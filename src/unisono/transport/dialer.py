"""Dials a peer: repeats attempts until the peer answers or certainly will not answer.

A refused connection is final, because the peer listened before its address was published. Three
kinds of failure are not final: a short interruption of the link, a peer that is briefly short of
descriptors, and a handshake for which one end was too slow. Slow handshakes occur when hundreds of
ranks start on a few cores.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from unisono.transport.connection import Connection
from unisono.transport.connection_setup import OutgoingSetup, SetupFailure
from unisono.transport.event_loop import WRITE, EventLoop, Timer
from unisono.transport.handshake import Handshake
from unisono.transport.introduction import Introduction
from unisono.transport.security import Security
from unisono.transport.sockets import Address, dial, format_address

_ATTEMPT_S = 0.7  # limit of one attempt; the kernel would retry only after 1, 3 and 7 s
_PAUSE_S = 0.1
_FINAL = (errno.ECONNREFUSED, errno.EACCES, errno.EPERM, errno.EINVAL, errno.EAFNOSUPPORT)
_HERE = (  # errors of this host, not of the peer's host
    errno.EADDRNOTAVAIL,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.ENETDOWN,
)
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DialRequest:
    """The target of a dial, this end's identity, and the seconds within which the target's host and
    process must answer.
    """

    rank: int
    address: Address
    source: str | None
    secret: bytes
    purpose: bytes
    security: Security
    introduction: Introduction
    host_s: float
    process_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DialFailure:
    """The reason for a failed dial.

    `here` is True if the cause is this process, not the peer. `answered` is True if the peer's host
    answered, but its process did not answer in time. `silent` is True if the peer's host did not
    answer at all.
    """

    text: str
    here: bool = False
    impostor: bool = False
    answered: bool = False
    silent: bool = False


class Dial:
    """One outgoing connection in progress. Calls `opened` or `failed` once, unless it is
    cancelled."""

    def __init__(
        self,
        loop: EventLoop,
        request: DialRequest,
        *,
        opened: Callable[[Connection], None],
        failed: Callable[[DialFailure], None],
    ) -> None:
        self._loop, self._request = loop, request
        self._opened, self._failed = opened, failed
        self._deadline = time.monotonic() + request.host_s
        self._last_deadline = time.monotonic() + request.process_s
        self._sock: socket.socket | None = None
        self._setup: OutgoingSetup | None = None
        self._timer: Timer | None = None
        self._over = False
        self._attempt()

    def cancel(self) -> None:
        """Ends the dial without calling `opened` or `failed`."""
        self._over = True
        self._drop()

    def _attempt(self) -> None:
        try:
            self._sock = dial(self._request.address, self._request.source)
        except OSError as error:
            self._retry(error.errno or 0)
            return
        self._timer = self._loop.later(_ATTEMPT_S, lambda: self._retry(errno.ETIMEDOUT))
        self._loop.watch(self._sock, WRITE, self._connected)

    def _connected(self) -> None:
        assert self._sock is not None
        number = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._retry(number)
            return
        self._clear_timer()
        sock, self._sock = self._sock, None
        request = self._request
        self._setup = OutgoingSetup(
            self._loop,
            Connection.of(sock),
            Handshake(
                request.secret, dialing=True, purpose=request.purpose, tls=request.security.tls
            ),
            request.process_s,
            security=request.security,
            introduction=request.introduction,
            opened=self._authenticated,
            failed=self._setup_failed,
        )
        self._setup.begin()

    def _authenticated(self, sock: Connection) -> None:
        self._over = True
        self._opened(sock)

    def _setup_failed(self, failure: SetupFailure) -> None:
        now = time.monotonic()
        if failure.slow:  # the peer's host answers
            self._deadline = min(now + self._request.host_s, self._last_deadline)
        if failure.impostor or now >= self._deadline:
            self._fail(failure.text, impostor=failure.impostor, answered=not failure.impostor)
        else:
            self._setup = None
            self._timer = self._loop.later(_PAUSE_S, self._attempt)

    def _retry(self, number: int) -> None:
        self._drop()
        if number in _EXHAUSTED:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            self._fail(f"no descriptors are left here (ulimit -n is {limit})", here=True)
        elif number in _FINAL or time.monotonic() >= self._deadline:
            self._fail(os.strerror(number), here=number in _HERE, silent=number in _SILENT)
        else:
            self._timer = self._loop.later(_PAUSE_S, self._attempt)

    def _fail(
        self,
        why: str,
        *,
        here: bool = False,
        impostor: bool = False,
        answered: bool = False,
        silent: bool = False,
    ) -> None:
        if self._over:
            return
        self._over = True
        text = f"rank {self._request.rank} at {format_address(self._request.address)}: {why}"
        self._failed(
            DialFailure(text=text, here=here, impostor=impostor, answered=answered, silent=silent)
        )

    def _drop(self) -> None:
        self._clear_timer()
        if self._sock is not None:
            self._loop.unwatch(self._sock)
            self._sock.close()
            self._sock = None
        if self._setup is not None:
            self._setup.cancel()
            self._setup = None

    def _clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

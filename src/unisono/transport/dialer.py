"""Dials a peer: repeats attempts until the peer answers or is known not to.

A refused connection is final, because the peer listened before its address was published. Three
other failures are not final: a short interruption of the link, a peer that is briefly short of
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
from unisono.transport.sockets import Address, dial, show

_ATTEMPT_S = 0.7  # the kernel itself would retry only after 1, 3 and 7 s
_PAUSE_S = 0.1
_FINAL = (errno.ECONNREFUSED, errno.EACCES, errno.EPERM, errno.EINVAL, errno.EAFNOSUPPORT)
_HERE = (  # errors of this host, not of the other
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
    """The target of a dial, this end's identity, and the times that the target's host and process
    may take."""

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
    """Reason for a missing connection.

    `here`: the cause is this process, not the peer. `answered`: the peer's host answered, but its
    process did not in time. `silent`: the peer's host did not answer at all.
    """

    text: str
    here: bool = False
    false: bool = False
    answered: bool = False
    silent: bool = False


class Dial:
    """One outgoing connection in progress. Calls `opened` or `failed` once, unless it is
    cancelled."""

    def __init__(
        self,
        loop: EventLoop,
        wanted: DialRequest,
        *,
        opened: Callable[[Connection], None],
        failed: Callable[[DialFailure], None],
    ) -> None:
        self._loop, self._wanted = loop, wanted
        self._opened, self._failed = opened, failed
        self._deadline = time.monotonic() + wanted.host_s
        self._last = time.monotonic() + wanted.process_s
        self._sock: socket.socket | None = None
        self._entering: OutgoingSetup | None = None
        self._alarm: Timer | None = None
        self._over = False
        self._attempt()

    def cancel(self) -> None:
        """Ends the dial without calling `opened` or `failed`."""
        self._over = True
        self._drop()

    def _attempt(self) -> None:
        try:
            self._sock = dial(self._wanted.address, self._wanted.source)
        except OSError as error:
            self._again(error.errno or 0)
            return
        self._alarm = self._loop.later(_ATTEMPT_S, lambda: self._again(errno.ETIMEDOUT))
        self._loop.watch(self._sock, WRITE, self._connected)

    def _connected(self) -> None:
        assert self._sock is not None
        number = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._again(number)
            return
        self._clear_alarm()
        sock, self._sock = self._sock, None
        wanted = self._wanted
        self._entering = OutgoingSetup(
            self._loop,
            Connection.of(sock),
            Handshake(wanted.secret, dialing=True, purpose=wanted.purpose, tls=wanted.security.tls),
            wanted.process_s,
            security=wanted.security,
            introduction=wanted.introduction,
            opened=self._proved,
            failed=self._broken,
        )
        self._entering.begin()

    def _proved(self, sock: Connection) -> None:
        self._over = True
        self._opened(sock)

    def _broken(self, broken: SetupFailure) -> None:
        now = time.monotonic()
        if broken.slow:  # the peer's host does answer
            self._deadline = min(now + self._wanted.host_s, self._last)
        if broken.false or now >= self._deadline:
            self._fail(broken.text, false=broken.false, answered=not broken.false)
        else:
            self._entering = None
            self._alarm = self._loop.later(_PAUSE_S, self._attempt)

    def _again(self, number: int) -> None:
        self._drop()
        if number in _EXHAUSTED:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            self._fail(f"no descriptors are left here (ulimit -n is {limit})", here=True)
        elif number in _FINAL or time.monotonic() >= self._deadline:
            self._fail(os.strerror(number), here=number in _HERE, silent=number in _SILENT)
        else:
            self._alarm = self._loop.later(_PAUSE_S, self._attempt)

    def _fail(
        self,
        why: str,
        *,
        here: bool = False,
        false: bool = False,
        answered: bool = False,
        silent: bool = False,
    ) -> None:
        if self._over:
            return
        self._over = True
        text = f"rank {self._wanted.rank} at {show(self._wanted.address)}: {why}"
        self._failed(
            DialFailure(text=text, here=here, false=false, answered=answered, silent=silent)
        )

    def _drop(self) -> None:
        self._clear_alarm()
        if self._sock is not None:
            self._loop.unwatch(self._sock)
            self._sock.close()
            self._sock = None
        if self._entering is not None:
            self._entering.cancel()
            self._entering = None

    def _clear_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

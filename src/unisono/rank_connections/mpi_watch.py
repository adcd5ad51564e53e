"""Control messages of a group over MPI: failures, and the most recent call of each rank.

One thread per group sleeps until its group has an event, and checks for messages twenty times a
second.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from unisono.rank_connections.control_messages import CALLED_BYTES
from unisono.rank_connections.group_endpoint import (
    FAILED_EVENT,
    OVERDUE_EVENT,
    Fault,
    GroupEndpoint,
    fault_of,
)
from unisono.transport import WATCH_TAG, Doorbell, MpiLink

_POLL_S = 0.05
_LAST_SENDS_S = 1.0
_MOST_TEXT_BYTES = 4096
_FAILED, _QUERY, _LAST_CALL = 1, 2, 3
_UNENDED: list[object] = []  # keeps sends alive: MPI may read their memory until it is finalised
_HEAD = struct.Struct("<BI")  # kind and fault; an error text or a rank's most recent call follows


class MpiWatch:
    """Exchanges control messages about `group` with its ranks on other hosts, `away`, until `close`
    is called.
    """

    def __init__(self, link: MpiLink, group: GroupEndpoint, away: Sequence[int]) -> None:
        self._link = link
        self._group = group
        self._away = away
        self._failure_is_known = False  # to the other ranks
        self._sends: list[tuple[Any, bytes]] = []
        self._closing = False
        self._doorbell = Doorbell(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="unisono-mpi-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after it has sent its last messages.

        Does nothing in a forked child. Does not wait if called in the thread itself, where the
        garbage collector may call it.
        """
        if os.getpid() == self._pid:
            self._closing = True
            self._doorbell.ring()
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _run(self) -> None:
        poll = select.poll()
        for fd in (self._group.events_fd(), self._doorbell.fd):
            poll.register(fd, select.POLLIN)
        try:
            while not self._closing:
                poll.poll(_POLL_S * 1000)
                self._report_events()
                self._receive()
            self._report_events()
            self._wait_for_sends()
        except self._link.mpi.Exception:
            pass  # ranks that wait for the lost rank detect the loss themselves

    def _wait_for_sends(self) -> None:
        deadline = time.monotonic() + _LAST_SENDS_S
        while not all(request.Test() for request, _ in self._sends):
            if time.monotonic() > deadline:
                _UNENDED.extend(self._sends)
                return
            time.sleep(1e-3)

    def _report_events(self) -> None:
        events = self._group.take_events()
        failure = self._group.failure() if events & FAILED_EVENT else None
        if failure is not None and not self._failure_is_known:
            self._failure_is_known = True
            fault, text = failure
            self._send_all(_HEAD.pack(_FAILED, fault) + text.encode()[:_MOST_TEXT_BYTES])
        elif events & OVERDUE_EVENT:
            self._send_all(_HEAD.pack(_QUERY, 0) + self._group.called())

    def _receive(self) -> None:
        mpi, comm = self._link.mpi, self._link.comm
        if self._sends:
            self._sends = [(request, kept) for request, kept in self._sends if not request.Test()]
        status = mpi.Status()
        while comm.Iprobe(mpi.ANY_SOURCE, WATCH_TAG, status):
            data = bytearray(status.Get_count(mpi.BYTE))
            peer = status.Get_source()
            comm.Recv([data, mpi.BYTE], peer, WATCH_TAG)
            self._handle(peer, bytes(data))

    def _handle(self, peer: int, data: bytes) -> None:
        what, fault = _HEAD.unpack(data[: _HEAD.size].ljust(_HEAD.size, b"\0"))
        rest = data[_HEAD.size :]
        if what == _FAILED:
            self._failure_is_known = True  # the peer has told all ranks
            self._group.fail(fault_of(fault), rest.decode(errors="replace"))
        elif what in (_QUERY, _LAST_CALL) and len(rest) == CALLED_BYTES:
            self._group.record_last_call(peer, rest)
            if what == _QUERY:
                self._send(peer, _HEAD.pack(_LAST_CALL, 0) + self._group.called())
        else:
            text = f"rank {peer} sent a malformed message: {len(data)} bytes of kind {what}"
            self._group.fail(Fault.SYSTEM, text)

    def _send_all(self, data: bytes) -> None:
        for peer in self._away:
            self._send(peer, data)

    def _send(self, peer: int, data: bytes) -> None:
        mpi = self._link.mpi
        with contextlib.suppress(mpi.Exception):  # if a peer is lost, tell the others nevertheless
            self._sends.append((self._link.comm.Isend([data, mpi.BYTE], peer, WATCH_TAG), data))

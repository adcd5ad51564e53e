"""A control channel: one connection for messages in both directions, which detects when the other
end is lost.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import Callable

from unisono.rank_connections.control_messages import ControlMessage, Frames, MessageKind
from unisono.transport import (
    CHECK_INTERVAL_S,
    READ,
    WRITE,
    EventLoop,
    Silence,
    prepare,
    probe_idle,
    retry_often,
)

_log = logging.getLogger("unisono")

_READ_BYTES = 1 << 16
_MOST_PENDING_BYTES = 8 << 20
# Maximum number of bytes of queries for last calls, and of answers, that are sent to a peer while
# the peer sends nothing. A stopped process does not read. Once these messages fill its kernel's
# buffers, that process would look like a lost host.
_MOST_UNREAD_BYTES = 8 << 10
# Seconds by which a silence may be longer than its measured duration: the silence may begin before
# the query that starts the measurement, and a busy machine may check late.
_UNSEEN_S = 0.4
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class WatchedChannel:
    """Sends messages to one rank and receives messages from that rank.

    `ended` is called once, when the connection has ended. Its argument describes what happened to
    the rank; it is empty if the rank left without a failure. `ended` may still send a last message.
    """

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        peer_timeout_s: float,
        *,
        received: Callable[[ControlMessage], None],
        ended: Callable[[str], None],
    ) -> None:
        self._loop, self._sock, self._peer_timeout_s = loop, sock, peer_timeout_s
        self._silence_limit_s = max(peer_timeout_s - _UNSEEN_S, peer_timeout_s / 2)
        self._received, self._ended = received, ended
        self._frames = Frames()
        self._pending = bytearray()
        self._unread_bytes = 0
        self._flush_is_due = False
        self._waiting = False
        self._silence: Silence | None = None  # not None while an acknowledgement is missing
        self._has_left = False
        self._over = False
        self.was_silent = False
        """True if the connection ended because the rank's host was silent for too long."""
        prepare(sock, peer_timeout_s)
        retry_often(sock)
        probe_idle(sock, peer_timeout_s)
        loop.watch(sock, READ, self._ready)

    def send(self, message: ControlMessage) -> None:
        """Queues a message. One system call then sends all queued messages."""
        is_query = message.kind in (MessageKind.LAST_CALL_QUERY, MessageKind.LAST_CALLS)
        if self._over or (is_query and self._unread_bytes > _MOST_UNREAD_BYTES):
            return
        packed = message.pack()
        self._pending += packed
        if is_query:
            self._unread_bytes += len(packed)
        if len(self._pending) > _MOST_PENDING_BYTES:
            self._end("has not read its messages for too long")
        elif not self._flush_is_due:
            self._flush_is_due = True
            self._loop.later(0, self._flush)

    def send_query(self, message: ControlMessage) -> None:
        """Sends a message that requires an answer. Until a message arrives, the host counts as lost
        if it is silent for too long.
        """
        self._waiting = True
        self.send(message)

    def mark_read(self) -> None:
        """Records that the rank reads its messages, since a message from it arrived on another
        connection.
        """
        self._unread_bytes = 0

    def send_last(self, message: ControlMessage) -> None:
        """Sends a last message before the channel closes, if the socket still accepts data."""
        with contextlib.suppress(OSError):
            self._sock.send(self._pending + message.pack())

    def close(self) -> None:
        """Closes the channel without a message; `ended` is not called."""
        if not self._over:
            self._over = True
            self._loop.unwatch(self._sock)
            self._sock.close()

    def _ready(self) -> None:
        self._read()
        if self._pending and not self._over:
            self._flush()

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(error)
            return
        if not data:
            self._end("is gone")
            return
        self._waiting = False
        self._unread_bytes = 0
        try:
            for message in self._frames.take(data):
                self._has_left = self._has_left or message.kind is MessageKind.BYE
                self._received(message)
                if self._over:
                    return
        except ValueError as error:
            self._end(f"sent a malformed message ({error})")
        except Exception as error:
            # A bug of unisono. End the channel: after an uncaught error the event loop would not
            # read it any more, and nobody would notice that messages are missing.
            _log.exception("unisono failed to handle a message of another rank")
            self._end(
                f"sent a message that this rank failed to handle: {type(error).__name__}: {error}"
            )

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._over:
            return
        try:
            del self._pending[: self._sock.send(self._pending)]
        except BlockingIOError:
            self._loop.watch(self._sock, READ | WRITE, self._ready)
            return
        except OSError as error:
            self._lost(error)
            return
        self._loop.watch(self._sock, READ | WRITE if self._pending else READ, self._ready)
        if self._silence is None:
            self._silence = Silence(self._sock)
            self._loop.later(CHECK_INTERVAL_S, self._check_silence)

    def _check_silence(self) -> None:
        """Ends the channel if an acknowledgement is missing for too long. Repeats the check until
        the acknowledgement arrives.
        """
        if self._over or self._silence is None:
            return
        duration_s = self._silence.duration_s()
        if duration_s is None:
            self._silence = None
        elif self._waiting and duration_s >= self._silence_limit_s:
            self._end_silent()
        else:
            self._loop.later(CHECK_INTERVAL_S, self._check_silence)

    def _lost(self, error: OSError) -> None:
        if error.errno in _SILENT:
            self._end_silent()
        else:
            self._end("is gone")

    def _end_silent(self) -> None:
        self.was_silent = True
        self._end(f"has been silent for {self._peer_timeout_s:g} s: its host or the link is down")

    def _end(self, why: str) -> None:
        if not self._over:
            self._over = True
            self._loop.unwatch(self._sock)
            try:
                self._ended("" if self._has_left else why)
            finally:
                self._sock.close()

"""Small messages between the ranks of one host, addressed by rank.

Each rank has a Unix datagram socket, whose abstract name is derived from the group's nonce. The
socket has no name in the file system and ends with its process. The kernel adds the sender's user
to each message; messages of other users are dropped. If a rank's socket is full or not open yet,
its messages wait at the sender.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Iterable

from unisono.closing import Closing
from unisono.errors import RendezvousError

_log = logging.getLogger("unisono")

_SOURCE = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MOST_BYTES = 1 << 17


class HostMessages(Closing):
    """The socket of one rank. `name` identifies the group, and is known only to processes of its
    user.
    """

    def __init__(self, name: str, rank: int, ranks: int) -> None:
        self._name = name
        self._rank = rank
        self._waiting: dict[int, deque[bytes]] = {
            peer: deque() for peer in range(ranks) if peer != rank
        }
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            self._socket.bind(self._address(rank))
        except OSError as error:
            self._socket.close()
            raise RendezvousError(
                f"rank {rank} already makes such a call in another thread"
            ) from error

    def send(self, to: int, data: bytes) -> None:
        """Sends `data` as soon as the socket of rank `to` accepts the message. Messages stay in
        order.
        """
        self._waiting[to].append(_SOURCE.pack(self._rank) + data)
        self._send_waiting(to)

    def flush(self) -> None:
        """Tries again to send waiting messages."""
        for peer in self._waiting:
            self._send_waiting(peer)

    def drop(self, peers: Iterable[int]) -> None:
        """Drops messages that wait for these ranks."""
        for peer in peers:
            if peer in self._waiting:
                self._waiting[peer].clear()

    def receive(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """Returns the messages that have arrived, with their sources. Waits at most `timeout_s` for
        a message."""
        found = []
        # Use poll, since select is limited to low descriptor numbers.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll(max(timeout_s, 0.0) * 1000)
        with contextlib.suppress(BlockingIOError):
            while True:
                message = self._take()
                if message is not None:
                    found.append(message)
        return found

    def _take(self) -> tuple[int, bytes] | None:
        space = socket.CMSG_SPACE(_CREDENTIALS.size)
        data, notes, _, _ = self._socket.recvmsg(_MOST_BYTES, space)
        users = [
            _CREDENTIALS.unpack(note)[1]
            for level, kind, note in notes
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        ]
        if len(users) != 1 or users[0] not in (os.getuid(), 0):
            _log.warning("dropped a message of user %s to rank %d", users, self._rank)
            return None
        if len(data) < _SOURCE.size:
            return None
        (source,) = _SOURCE.unpack_from(data)
        return (source, data[_SOURCE.size :]) if source in self._waiting else None

    def _send_waiting(self, peer: int) -> None:
        waiting = self._waiting[peer]
        # ConnectionRefusedError: the peer's socket is not open. BlockingIOError: the socket is
        # full.
        with contextlib.suppress(ConnectionRefusedError, BlockingIOError):
            while waiting:
                self._socket.sendto(waiting[0], self._address(peer))
                waiting.popleft()

    def _address(self, rank: int) -> str:
        text = f"{os.getuid()}\0{self._name}\0{rank}"
        return f"\0unisono-post-{hashlib.sha256(text.encode()).hexdigest()[:40]}"

    def close(self) -> None:
        """Closes the socket. Messages that are not yet sent or received are lost."""
        self._socket.close()

"""Measures the time for which a peer's acknowledgement has been missing, as in
`csrc/transport/silence.h`.

The kernel's own limit (TCP_USER_TIMEOUT) is not suitable: it counts from the first retransmission.
It also fails at once on an interface without a cable, although a retry could succeed a moment
later. So this module only asks the kernel when data last arrived.
"""

from __future__ import annotations

import socket
import time

from unisono.transport.sockets import read_info

CHECK_INTERVAL_S = 0.1
_PAUSE_S = 1.0
"""Seconds without a check after which unacknowledged data may be too new to count as silence."""

_UNACKED, _RECEIVED_MS = 24, 56  # offsets of these fields in struct tcp_info


class Silence:
    """Measures how long a peer's acknowledgement has been missing on one connection. Make the
    object after a send, and call `duration_s` periodically.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._since_s = self._checked_s = time.monotonic()

    def duration_s(self) -> float | None:
        """Returns the seconds for which an acknowledgement has been missing; None if none is
        expected.
        """
        now = time.monotonic()
        unacked, received_ms = read_info(self._sock, _UNACKED, _RECEIVED_MS)
        was_unchecked = now - self._checked_s > _PAUSE_S
        self._checked_s = now
        if was_unchecked:
            self._since_s = now
        self._since_s = max(self._since_s, now - received_ms / 1000)
        return now - self._since_s if unacked else None

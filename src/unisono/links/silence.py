"""How long the host at the other end of a connection has owed an answer; as in `csrc/silence.h`.

The kernel would watch that itself (TCP_USER_TIMEOUT), but by its own clock: it counts from when it
first sends again, and gives up as soon as it cannot send, as on an interface whose cable is out,
though a retry a moment later would get through. So it is only asked when it last heard anything.
"""

from __future__ import annotations

import socket
import time

from unisono.links.sockets import read_info

LOOK_EACH_S = 0.1
_PAUSE_S = 1.0  # after so long without a look, what is unanswered may just have been sent

_UNACKED, _HEARD_MS = 24, 56  # their places in struct tcp_info


class Silence:
    """Of one connection. Begins when something is sent; counts while it is looked at."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._since_s = self._looked_s = time.monotonic()

    def lasts_s(self) -> float | None:
        """For how long nothing was heard that should have been; None if nothing is owed."""
        now = time.monotonic()
        unacked, heard_ms = read_info(self._sock, _UNACKED, _HEARD_MS)
        was_away = now - self._looked_s > _PAUSE_S
        self._looked_s = now
        if was_away:
            self._since_s = now
        self._since_s = max(self._since_s, now - heard_ms / 1000)
        return now - self._since_s if unacked else None

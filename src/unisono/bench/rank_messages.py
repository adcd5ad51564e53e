"""Messages between the benchmark and its ranks: JSON lines over a Unix socket.

A rank that waits for a command is blocked in the kernel, so it does not slow down the measured
contestant. Standard input is unsuitable, because `mpiexec` passes it only to rank 0.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

Message = dict[str, Any]


class RankConnection:
    """One end of a connection between the benchmark and a rank."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("r", encoding="utf-8")

    @classmethod
    def connect(cls, path: Path) -> RankConnection:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(path))
        return cls(connection)

    def send(self, message: Message) -> None:
        self._connection.sendall((json.dumps(message) + "\n").encode())

    def receive(self, timeout_s: float | None = None) -> Message:
        """Receives the next message. Raises TimeoutError, or EOFError if the connection is
        closed."""
        self._connection.settimeout(timeout_s)
        try:
            line = self._reader.readline()
        except ConnectionError as error:
            raise EOFError("the connection to a rank was lost") from error
        if not line:
            raise EOFError("the connection to a rank was closed")
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        self._reader.close()
        self._connection.close()

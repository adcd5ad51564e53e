"""Ranks as threads that use bootstrap stores, for tests of the stores."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

_UNASSIGNED_PORTS = 10_000, 32_000
"""Ports below those that Linux assigns (`net.ipv4.ip_local_port_range`)."""


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Runs the calls concurrently and returns the result or exception of each call."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(outcome, call) for call in calls]]


def free_port(address: str = "127.0.0.1") -> int:
    """Returns an unused port.

    The system gives no port of this range to sockets that ask for any port, so none of them takes
    the port before the test listens there.
    """
    while True:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
            port = random.SystemRandom().randrange(*_UNASSIGNED_PORTS)
            with contextlib.suppress(OSError):
                listener.bind((address, port))
                return port


def all_are(outcomes: Sequence[Any], error: type[Exception], text: str) -> None:
    """Checks that every outcome is an error of this type whose text contains `text`."""
    for outcome in outcomes:
        assert isinstance(outcome, error), outcomes
        assert text in str(outcome), outcomes


class Dictionary:
    """A key-value store in this process's memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str | bytes, /) -> None:
        with self._changed:
            self.values[key] = value.encode() if isinstance(value, str) else value
            self._changed.notify_all()

    def get(self, key: str, /) -> bytes:
        return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        with self._changed:
            there = lambda: all(key in self.values for key in keys)  # noqa: E731
            if not self._changed.wait_for(there, timeout.total_seconds()):
                raise RuntimeError("wait timeout")

"""A watch over device work that waits for other ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from unisono.communicator import has_failed
from unisono.torch_backend.device.peer_device import PeerDevice

_PERIOD_S = 0.1


class LostRankWatch:
    """Lets this process's streams go on if a rank dies before its device work has ended.

    A thread checks the ranks while device work is left; it starts with the first work.
    """

    def __init__(self, comm: Any, device: PeerDevice) -> None:
        self._comm, self._device = comm, device
        self._ends: list[Callable[[], bool]] = []
        self._has_work = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, has_ended: Callable[[], bool]) -> None:
        """Adds a kind of device work. `has_ended` returns True if none of it waits for a rank."""
        self._ends.append(has_ended)

    def begin(self) -> None:
        """Notes that device work was enqueued."""
        if not self._has_work.is_set():
            self._has_work.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="unisono-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the watch, and lets the streams go on if a rank has died."""
        self._closed.set()
        self._has_work.set()
        if self._must_release():
            self._device.release()

    def _must_release(self) -> bool:
        return has_failed(self._comm) or self._device.has_lost_rank()

    def _has_ended(self) -> bool:
        return all(has_ended() for has_ended in self._ends)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._has_work.wait()
            if self._closed.wait(_PERIOD_S):
                return
            if self._must_release():
                self._device.release()
            elif self._has_ended():
                self._has_work.clear()
                if not self._has_ended():  # work began meanwhile
                    self._has_work.set()

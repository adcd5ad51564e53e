"""The workers that are connected to a sender, and what each has said last."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any

from unisono import config
from unisono.bootstrap import listen_for_links
from unisono.weight_transfer.messages import Arrival, Ready

_ARRIVAL_S = 10.0
"""Seconds in which a connected worker must say what it is."""
_POLL_S = 0.05


class Worker:
    """One worker."""

    def __init__(self, arrival: Arrival, link: Connection) -> None:
        self.name, self.host, self._link = arrival.name, arrival.host, link
        self.is_ready = False
        """True if the worker waits for an update."""
        self.is_lost = False

    def tell(self, message: object) -> bool:
        """Sends a message; returns False if the worker is lost."""
        try:
            self._link.send(message)
        except OSError:
            self.drop()
        return not self.is_lost

    def drop(self) -> None:
        """Ends the connection."""
        self.is_lost = True
        self._link.close()

    @property
    def link(self) -> Connection:
        """The connection, to wait for it."""
        return self._link


class ConnectedWorkers:
    """Accepts workers, and reads their messages."""

    def __init__(self, settings: config.Settings, key: bytes) -> None:
        self._arrivals: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._listener = listen_for_links(settings, key, self._arrived)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port at which workers are accepted."""
        return self._listener.addresses[0]

    def _arrived(self, link: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            if link.poll(_ARRIVAL_S) and isinstance(arrival := link.recv(), Arrival):
                self._arrivals.put(Worker(arrival, link))
                return
        link.close()

    def present(self) -> list[Worker]:
        """Returns the workers that are connected now, in the order of their hosts."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._workers.append(self._arrivals.get_nowait())
        for worker in self._workers:
            self._note_end(worker)
        self._workers = [each for each in self._workers if not each.is_lost]
        hosts = list(dict.fromkeys(each.host for each in self._workers))
        return sorted(self._workers, key=lambda each: hosts.index(each.host))

    def _note_end(self, worker: Worker) -> None:
        """Notes that a worker has ended, or has begun to wait for an update."""
        with contextlib.suppress(OSError):
            while not worker.is_lost and worker.link.poll():
                self._read(worker)

    def _read(self, worker: Worker) -> Any:
        """Returns a worker's next message; None if it has ended, or only says that it is ready."""
        try:
            message = worker.link.recv()
        except (EOFError, OSError):
            worker.drop()
            return None
        if isinstance(message, Ready):
            worker.is_ready = True
            return None
        return message

    def gather(
        self,
        workers: Iterable[Worker],
        deadline: float,
        is_done: Callable[[Worker, Any], bool],
    ) -> None:
        """Reads messages until each worker is done, is lost, or the deadline has passed.

        `is_done(worker, message)` is asked after each message; `message` is None for `Ready`.
        """
        open_ones = {each.link: each for each in workers if not each.is_lost}
        while open_ones and time.monotonic() < deadline:
            left_s = max(deadline - time.monotonic(), 0.0)
            for link in wait(list(open_ones), min(left_s, _POLL_S)):
                worker = open_ones[link]  # type: ignore[index]
                message = self._read(worker)
                if worker.is_lost or is_done(worker, message):
                    del open_ones[link]  # type: ignore[arg-type]

    def close(self, farewell: object) -> None:
        """Tells all workers that no update follows, and ends their connections."""
        self._listener.close()
        for worker in self.present():
            worker.tell(farewell)
            if not worker.is_lost:
                worker.drop()

"""The workers that are connected to a sender, and what each has said last."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from unisono import config
from unisono.bootstrap import listen_for_links
from unisono.weight_transfer.messages import Accepted, Arrival, Ready

_ARRIVAL_S = 10.0
"""Seconds in which a connected worker must say what it is."""
_Message = TypeVar("_Message")


class Worker:
    """One worker."""

    def __init__(self, arrival: Arrival, link: Connection) -> None:
        self.name, self.host, self.link = arrival.name, arrival.host, link
        self.is_ready = False
        """True if the worker waits for an update."""
        self.is_lost = False

    def tell(self, message: object) -> bool:
        """Sends a message; returns False if the worker is lost."""
        try:
            self.link.send(message)
        except OSError:
            self.drop()
        return not self.is_lost

    def drop(self) -> None:
        """Ends the connection."""
        self.is_lost = True
        self.link.close()


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
                worker = Worker(arrival, link)
                self._arrivals.put(worker)
                worker.tell(Accepted())
                return
        link.close()

    def present(self) -> list[Worker]:
        """Returns the workers that are connected now, in the order of their hosts."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._workers.append(self._arrivals.get_nowait())
        for worker in self._workers:
            self._read_all(worker)
        self._workers = [each for each in self._workers if not each.is_lost]
        hosts = list(dict.fromkeys(each.host for each in self._workers))
        return sorted(self._workers, key=lambda each: hosts.index(each.host))

    def _read_all(self, worker: Worker) -> None:
        """Reads the messages of a worker that have arrived: it is ready, or has ended."""
        with contextlib.suppress(OSError):
            while not worker.is_lost and worker.link.poll():
                self._read(worker)

    def _read(self, worker: Worker) -> Any:
        """Returns a worker's next message; None if it has ended."""
        try:
            message = worker.link.recv()
        except (EOFError, OSError):
            worker.drop()
            return None
        if isinstance(message, Ready):
            worker.is_ready = True
        return message

    def replies(
        self, workers: Iterable[Worker], kind: type[_Message], timeout_s: float
    ) -> dict[Worker, _Message]:
        """Returns the next message of a kind of each worker that sends one within the time limit.
        Ignores messages of other kinds.
        """
        found: dict[Worker, _Message] = {}
        deadline = time.monotonic() + timeout_s
        waiting: dict[Any, Worker] = {each.link: each for each in workers if not each.is_lost}
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for link in wait(list(waiting), left_s):
                worker = waiting[link]
                message = self._read(worker)
                if isinstance(message, kind):
                    found[worker] = message
                if worker.is_lost or worker in found:
                    del waiting[link]
        return found

    def close(self, farewell: object) -> None:
        """Tells all workers that no update follows, and ends their connections."""
        self._listener.close()
        for worker in self.present():
            worker.tell(farewell)
            if not worker.is_lost:
                worker.drop()

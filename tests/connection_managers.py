"""Connection managers in one process, with fake native groups that record the calls they get."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from unisono.control.connection_manager import ConnectionManager
from unisono.control.group_endpoint import Fault, PeerInfo
from unisono.errors import UnisonoError
from unisono.transport.introduction import tag_of

SECRET = b"the secret of this job"
WORLD = b"a world of the tests"


class Recorder:
    """A fake native group: records its calls and keeps the sockets."""

    def __init__(self) -> None:
        self.sockets: dict[tuple[int, int, int], socket.socket] = {}
        self.streams: set[int] = set()
        self.left: set[int] = set()
        self.calls: dict[int, bytes] = {}
        self.last_call = b"nothing"
        self.lookers = 0
        self.vote = 0
        self._failure: tuple[int, str] | None = None
        self.failed_at = 0.0
        self._events = 0
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # ---- called by the connection manager

    def attach(
        self, peer: int, kind: int, stream: int, streams: int, fd: int, tls: object = None
    ) -> None:
        assert not os.get_blocking(fd)
        self.streams.add(streams)
        self.sockets[peer, kind, stream] = socket.socket(fileno=fd)

    def abandon(self) -> None:
        for sock in self.sockets.values():
            sock.close()

    def peer_left(self, peer: int) -> None:
        self.left.add(peer)

    def fail(self, fault: int, text: str) -> None:
        if fault not in list(Fault):  # like the core
            raise UnisonoError(f"fault: expected a known number, got {fault}")
        if self._failure is None:
            self._failure = (fault, text)
            self.failed_at = time.monotonic()

    def failure(self) -> tuple[int, str] | None:
        return self._failure

    def called(self) -> bytes:
        self.lookers += 1
        return self.last_call

    def heard(self, peer: int, called: bytes) -> None:
        self.calls[peer] = called.rstrip(b"\0")

    def exchange_successor(self, expected: int, desired: int) -> int:
        seen = self.vote
        if seen == expected:
            self.vote = desired
        return seen

    def events_fd(self) -> int:
        return self._fd

    def take_events(self) -> int:
        with self._lock:
            os.eventfd_read(self._fd)
            events, self._events = self._events, 0
            return events

    # ---- called by the tests

    def raise_events(self, events: int) -> None:
        with self._lock:
            self._events |= events
            os.eventfd_write(self._fd, 1)

    def fail_here(self, fault: int, text: str) -> None:
        self.fail(fault, text)
        self.raise_events(1)

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()
        os.close(self._fd)


class Place:
    """One rank: its connection manager, and a recorder for each group that it has entered."""

    def __init__(self, porter: ConnectionManager, rank: int) -> None:
        self.porter, self.rank = porter, rank
        self.ends: dict[bytes, Recorder] = {}

    def enter(
        self,
        group: bytes,
        members: Sequence[int],
        end: Recorder | None = None,
        circle: bytes | None = None,
    ) -> Recorder:
        end = self.ends[group] = end or Recorder()
        self.porter.enter(group, members, list(members).index(self.rank), end, circle)
        return end

    @staticmethod
    def tag(group: bytes) -> bytes:
        return tag_of(group)

    def close(self) -> None:
        self.porter.close()
        for end in self.ends.values():
            end.close()


def make_porter(
    address: str | Sequence[str] = "127.0.0.1",
    *,
    streams: int = 1,
    peer_timeout_s: float = 2.5,
) -> ConnectionManager:
    addresses = [address] if isinstance(address, str) else address
    return ConnectionManager(
        addresses=addresses,
        ports=None,
        streams=streams,
        peer_timeout_s=peer_timeout_s,
    )


def contacts_of(porters: Sequence[ConnectionManager]) -> list[PeerInfo]:
    return [PeerInfo(rank=i, host=i, addresses=p.bound) for i, p in enumerate(porters)]


@contextlib.contextmanager
def world(
    ranks: int, address: str | Sequence[str] = "127.0.0.1", *, streams: int = 1
) -> Iterator[list[Place]]:
    """Makes connection managers for `ranks` ranks that have joined, all in this process."""
    porters = [make_porter(address, streams=streams) for _ in range(ranks)]
    contacts = contacts_of(porters)
    places = [Place(porter, rank) for rank, porter in enumerate(porters)]
    try:
        with ThreadPoolExecutor(ranks) as pool:
            joining = [
                pool.submit(
                    p.join, world=WORLD, secret=SECRET, rank=r, contacts=contacts, timeout_s=20
                )
                for r, p in enumerate(porters)
            ]
            for one in joining:
                one.result()
        yield places
    finally:
        with ThreadPoolExecutor(ranks) as pool:
            list(pool.map(Place.close, places))


def wait_until(true: Callable[[], object], in_s: float = 5.0) -> None:
    deadline = time.monotonic() + in_s
    while not true():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.002)


def exchange(one: Recorder, other: Recorder, me: int, peer: int, kind: int = 0) -> None:
    """Asserts that two ranks of a group are connected to each other, not to other ranks."""
    (streams,) = one.streams | other.streams
    for stream in range(streams):
        here, there = one.sockets[peer, kind, stream], other.sockets[me, kind, stream]
        for left, right in ((here, there), (there, here)):
            text = f"{me} {peer} {kind} {stream}".encode()
            left.sendall(text)
            right.settimeout(5)
            assert right.recv(64) == text

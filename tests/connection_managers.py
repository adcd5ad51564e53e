"""Connection managers in one process, with simulated native groups that record their calls."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from time_limits import PATIENCE_S
from unisono.errors import UnisonoError
from unisono.rank_connections.connection_manager import ConnectionManager
from unisono.rank_connections.group_endpoint import Fault, PeerInfo
from unisono.transport.introduction import tag_of

SECRET = b"the secret of this job"
WORLD = b"a world of the tests"


class Recorder:
    """A simulated native group of a connection manager; it records calls and keeps the sockets."""

    def __init__(self) -> None:
        self.sockets: dict[tuple[int, int, int], socket.socket] = {}
        self.streams: set[int] = set()
        self.left: set[int] = set()
        self.calls: dict[int, bytes] = {}
        self.last_call = b"nothing"
        self.queries = 0
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
        if fault not in list(Fault):  # the native core also refuses unknown faults
            raise UnisonoError(f"fault: expected a number that is known, got {fault}")
        if self._failure is None:
            self._failure = (fault, text)
            self.failed_at = time.monotonic()

    def failure(self) -> tuple[int, str] | None:
        return self._failure

    def called(self) -> bytes:
        self.queries += 1
        return self.last_call

    def record_last_call(self, peer: int, called: bytes) -> None:
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


class Rank:
    """A rank's connection manager, with a recorder for each group that the rank entered."""

    def __init__(self, manager: ConnectionManager, rank: int) -> None:
        self.manager, self.rank = manager, rank
        self.ends: dict[bytes, Recorder] = {}

    def enter(
        self,
        group: bytes,
        members: Sequence[int],
        end: Recorder | None = None,
        control_group: bytes | None = None,
    ) -> Recorder:
        end = self.ends[group] = end or Recorder()
        self.manager.enter(group, members, list(members).index(self.rank), end, control_group)
        return end

    @staticmethod
    def tag(group: bytes) -> bytes:
        return tag_of(group)

    def close(self) -> None:
        self.manager.close()
        for end in self.ends.values():
            end.close()


def make_manager(
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


def peer_infos_of(managers: Sequence[ConnectionManager]) -> list[PeerInfo]:
    return [PeerInfo(rank=i, host=i, addresses=p.bound) for i, p in enumerate(managers)]


@contextlib.contextmanager
def world(
    ranks: int, address: str | Sequence[str] = "127.0.0.1", *, streams: int = 1
) -> Iterator[list[Rank]]:
    """Yields `ranks` connection managers that have joined one world in this process."""
    managers = [make_manager(address, streams=streams) for _ in range(ranks)]
    peer_infos = peer_infos_of(managers)
    members = [Rank(manager, rank) for rank, manager in enumerate(managers)]
    try:
        with ThreadPoolExecutor(ranks) as pool:
            joining = [
                pool.submit(
                    p.join, world=WORLD, secret=SECRET, rank=r, peer_infos=peer_infos, timeout_s=20
                )
                for r, p in enumerate(managers)
            ]
            for one in joining:
                one.result()
        yield members
    finally:
        with ThreadPoolExecutor(ranks) as pool:
            list(pool.map(Rank.close, members))


def wait_until(condition: Callable[[], object], in_s: float = PATIENCE_S) -> None:
    """Waits until the condition is met. Fails after `in_s` seconds."""
    deadline = time.monotonic() + in_s
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.002)


def exchange(one: Recorder, other: Recorder, me: int, peer: int, kind: int = 0) -> None:
    """Exchanges text over each connection between two ranks of a group, to check that both ends
    match.
    """
    (streams,) = one.streams | other.streams
    for stream in range(streams):
        here, there = one.sockets[peer, kind, stream], other.sockets[me, kind, stream]
        for left, right in ((here, there), (there, here)):
            text = f"{me} {peer} {kind} {stream}".encode()
            left.sendall(text)
            right.settimeout(PATIENCE_S)
            assert right.recv(64) == text

"""A process with one rank's connection manager, which reports events on stdout as JSON.

`control_process.py RANK SIZE ADDRESS` reports its address, reads all addresses from stdin, joins,
and enters one group of all ranks. Then it reads one command from each line:

- `overdue`: waits for the other ranks from now on, and so queries their last calls
- `reach`: connects to all ranks
- `pump`: sends and receives on every connection, forever
- `flowing`: reports whether bytes still arrive
- `quit`: ends
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from connection_managers import SECRET, Recorder, make_manager
from time_limits import PATIENCE_S
from unisono.rank_connections.group_endpoint import OVERDUE_EVENT, PeerInfo

_QUERY_PAUSE_S = 0.1


class ReportingRecorder(Recorder):
    """A recorder that also reports its calls."""

    received_at = 0.0

    def attach(
        self, peer: int, kind: int, stream: int, streams: int, fd: int, tls: object = None
    ) -> None:
        super().attach(peer, kind, stream, streams, fd, tls)
        report("attached", peer=peer)

    def fail(self, fault: int, text: str) -> None:
        if self.failure() is None:
            report("failed", fault=fault, text=text)
        super().fail(fault, text)

    def peer_left(self, peer: int) -> None:
        report("left", peer=peer)

    def record_last_call(self, peer: int, called: bytes) -> None:
        if peer not in self.calls:
            report("recorded", peer=peer)
        super().record_last_call(peer, called)

    def pump(self) -> None:
        for sock in self.sockets.values():
            sock.settimeout(60)
            for what in (self._send, self._receive):
                threading.Thread(target=what, args=[sock], daemon=True).start()

    def _send(self, sock: socket.socket) -> None:
        try:
            while True:
                sock.sendall(bytes(1 << 16))
        except OSError as error:
            report("broken", error=error.strerror)

    def _receive(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while sock.recv(1 << 20):
                self.received_at = time.monotonic()

    def be_overdue(self) -> None:
        while self.failure() is None:
            self.raise_events(OVERDUE_EVENT)
            time.sleep(_QUERY_PAUSE_S)


def report(event: str, **facts: Any) -> None:
    # A single write, since several threads report concurrently.
    sys.stdout.write(json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n")
    sys.stdout.flush()


def main(rank: int, size: int, address: str) -> None:
    manager = make_manager(address)
    report("listens", address=manager.bound[0])
    peer_infos = [
        PeerInfo(rank=number, host=number, addresses=((host, port),))
        for number, (host, port) in enumerate(json.loads(sys.stdin.readline()))
    ]
    manager.join(world=b"processes", secret=SECRET, rank=rank, peer_infos=peer_infos, timeout_s=20)
    end = ReportingRecorder()
    manager.enter(b"all", range(size), rank, end)
    report("joined")
    for line in sys.stdin:
        if line == "overdue\n":
            threading.Thread(target=end.be_overdue, daemon=True).start()
        elif line == "reach\n":
            manager.reach(b"all", range(size), 0)
        elif line == "pump\n":
            end.pump()
        elif line == "flowing\n":
            report("flowing", still=time.monotonic() - end.received_at < 0.5)
        elif line == "quit\n":
            break
    manager.close()


class RankProcess:
    """A rank's process, with methods for the test that controls it."""

    def __init__(self, words: Sequence[str], start: Callable[..., subprocess.Popen[str]]) -> None:
        self.process = start(
            [sys.executable, __file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def expect(self, event: str, in_s: float = PATIENCE_S) -> dict[str, Any]:
        """Returns the first event of this kind, even if it happened before the call."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.count(event), in_s), (event, self.events)
            return next(one for one in self.events if one["event"] == event)

    def count(self, event: str) -> int:
        return sum(one["event"] == event for one in self.events)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()


def join_all(ranks: Sequence[RankProcess]) -> None:
    """Sends all addresses to all ranks, and waits until all have joined."""
    peer_infos = json.dumps([rank.expect("listens")["address"] for rank in ranks])
    for rank in ranks:
        rank.send(peer_infos)
    for rank in ranks:
        rank.expect("joined")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

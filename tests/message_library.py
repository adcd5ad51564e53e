"""A simulated message library within one process. A poll copies messages and completes them in
random order.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Transfer:
    address: int
    size: int
    ticket: int
    end: MessageLibrary


class Fabric:
    """The fabric that connects the message libraries of all ranks and transports of a group."""

    def __init__(self, seed: int) -> None:
        self.lock = threading.Lock()
        self.random = random.Random(seed)
        self.stalled = False  # True if the fabric moves no payloads
        self.releases = True  # True if closing a library releases its memory
        self.interrupt: Callable[[], object] | None = None  # called once, during a poll
        self.reached: list[tuple[int, int]] = []  # address and size of written memory
        # libraries by rank and kind of transport
        self.ends: dict[tuple[int, int], MessageLibrary] = {}
        self.sends: dict[tuple[int, int, int], deque[Transfer]] = defaultdict(deque)
        self.receives: dict[tuple[int, int, int], deque[Transfer]] = defaultdict(deque)

    def library(self, rank: int, kind: int) -> MessageLibrary:
        self.ends[rank, kind] = MessageLibrary(self, rank, kind)
        return self.ends[rank, kind]

    def match(self, way: tuple[int, int, int]) -> None:
        """Moves matched messages between two ranks on one kind of transport."""
        while not self.stalled and self.sends[way] and self.receives[way]:
            sent, wanted = self.sends[way].popleft(), self.receives[way].popleft()
            assert sent.size == wanted.size
            ctypes.memmove(wanted.address, sent.address, sent.size)
            self.reached.append((wanted.address, wanted.size))
            for transfer in (sent, wanted):
                transfer.end.ended.append((transfer.ticket, ""))


class MessageLibrary:
    """One rank's library; `csrc/transport/message_library.h` documents the interface."""

    def __init__(self, fabric: Fabric, rank: int, kind: int) -> None:
        self.fabric = fabric
        self.rank = rank
        self.kind = kind
        self.heads: deque[bytes] = deque()
        self.ended: list[tuple[int, str]] = []
        self.slots: list[tuple[int, int]] = []
        self.free = 0
        self.next = 0

    def listen(self, address: int, slot_bytes: int, slots: int) -> None:
        self.slots = [(address + i * slot_bytes, slot_bytes) for i in range(slots)]
        self.free = slots

    def reuse(self) -> None:
        self.free += 1

    def send_head(self, peer: int, address: int, size: int, ticket: int) -> bool:
        with self.fabric.lock:
            self.fabric.ends[peer, self.kind].heads.append(ctypes.string_at(address, size))
            if self.fabric.random.random() < 0.5:
                return True
            self.ended.append((ticket, ""))
            return False

    def send(self, peer: int, address: int, size: int, ticket: int) -> bool:
        with self.fabric.lock:
            way = self.rank, peer, self.kind
            self.fabric.sends[way].append(Transfer(address, size, ticket, self))
            self.fabric.match(way)
            return False

    def receive(self, peer: int, address: int, size: int, ticket: int) -> bool:
        with self.fabric.lock:
            way = peer, self.rank, self.kind
            self.fabric.receives[way].append(Transfer(address, size, ticket, self))
            self.fabric.match(way)
            return False

    def poll(self) -> int | tuple[int, list[tuple[int, str]]]:
        handler, self.fabric.interrupt = self.fabric.interrupt, None
        if handler is not None:
            handler()
        with self.fabric.lock:
            filled = 0
            while self.heads and self.free and self.fabric.random.random() < 0.8:
                address, slot_bytes = self.slots[self.next]
                head = self.heads.popleft()
                assert len(head) <= slot_bytes
                ctypes.memmove(address, head, len(head))
                self.next = (self.next + 1) % len(self.slots)
                self.free -= 1
                filled += 1
            self.fabric.random.shuffle(self.ended)
            some = self.fabric.random.randint(0, len(self.ended))
            ended, self.ended = self.ended[:some], self.ended[some:]
            return (filled, ended) if ended else filled

    def close(self) -> bool:
        self.slots, self.free = [], 0
        return self.fabric.releases

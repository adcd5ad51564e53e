"""A packet-level network simulator, with which tests compare the simulator's flows.

It models store and forward: a link sends one packet at a time, and a switch forwards a packet after
it has received the whole packet. A link alternates between the packets of messages that start at
the link, and forwards other packets in order of arrival. Queues are unlimited, and no packet is
lost.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from itertools import count

from unisono.algorithms.cost import whole_chunks
from unisono.schedule import Schedule
from unisono.topology import Topology


class PacketNetwork:
    """Starts messages with `send`; `run` makes a callback when a message's last packet arrives."""

    def __init__(self, topology: Topology, packet_bytes: int) -> None:
        self.topology = topology
        self.packet_bytes = packet_bytes
        self.now = 0.0
        self.events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self.number = count()
        self.queues: dict[int, deque[tuple[int, int, int]]] = defaultdict(deque)
        self.turns: dict[int, deque[int]] = defaultdict(deque)
        self.busy: set[int] = set()
        self.paths: list[list[int]] = []
        self.unsent: list[float] = []
        self.missing: list[float] = []
        self.done: list[int] = []

    def send(self, src: int, dst: int, nbytes: float) -> int:
        message = len(self.paths)
        self.paths.append(self.topology.route(src, dst))
        self.unsent.append(nbytes)
        self.missing.append(nbytes)
        self.turns[self.paths[-1][0]].append(message)
        self.start(self.paths[-1][0])
        return message

    def start(self, link: int) -> None:
        """Sends the next packet of a link, if the link is free. Forwarded packets have priority
        over packets that enter the network at this link.
        """
        if link in self.busy:
            return
        if self.queues[link]:
            message, hop, size = self.queues[link].popleft()
        elif self.turns[link]:
            message, hop = self.turns[link].popleft(), 0
            size = int(min(self.packet_bytes, self.unsent[message]))
            self.unsent[message] -= size
            if self.unsent[message] > 0:
                self.turns[link].append(message)
        else:
            return
        self.busy.add(link)
        out = self.now + size / self.topology.links.bandwidth_Bps[link]
        there = out + self.topology.links.latency_s[link]
        heapq.heappush(self.events, (out, next(self.number), "free", (link,)))
        heapq.heappush(self.events, (there, next(self.number), "there", (message, hop, size)))

    def step(self) -> int | None:
        """Runs the next event. Returns a message if the event was the message's end."""
        self.now, _, what, which = heapq.heappop(self.events)
        if what == "free":
            self.busy.discard(which[0])
            self.start(which[0])
            return None
        message, hop, size = which
        if hop + 1 < len(self.paths[message]):
            link = self.paths[message][hop + 1]
            self.queues[link].append((message, hop + 1, size))
            self.start(link)
            return None
        self.missing[message] -= size
        return message if self.missing[message] <= 0 else None


def time_s(schedule: Schedule, topology: Topology, nbytes: int, packet_bytes: int = 4096) -> float:
    """Returns the seconds that a schedule takes in packets. A message starts after the last writes
    of its data.
    """
    network = PacketNetwork(topology, packet_bytes)
    chunk_bytes = nbytes / whole_chunks(schedule.collective)
    makers: dict[tuple[int, int], set[int]] = defaultdict(set)
    ends: list[tuple[int, int]] = []
    sizes: list[float] = []
    needs: list[set[int]] = []
    for _, transfers in schedule.rounds():
        writes: list[tuple[tuple[int, int], int, bool]] = []
        for t in transfers:
            task = len(ends)
            ends.append((t.src, t.dst))
            sizes.append(t.count * chunk_bytes)
            chunks = range(t.count)
            needs.append(set().union(*(makers[t.src, t.src_chunk + i] for i in chunks)))
            writes += [((t.dst, t.dst_chunk + i), task, t.reduce) for i in chunks]
        for place, task, adds in writes:
            makers[place] = makers[place] | {task} if adds else {task}
    waiting = [set(of) for of in needs]
    wanted = defaultdict(list)
    for task, of in enumerate(needs):
        for other in of:
            wanted[other].append(task)
    sent = {network.send(*ends[i], sizes[i]): i for i, of in enumerate(needs) if not of}
    while network.events:
        message = network.step()
        if message is None:
            continue
        for task in wanted[sent[message]]:
            waiting[task].discard(sent[message])
            if not waiting[task]:
                sent[network.send(*ends[task], sizes[task])] = task
    return network.now

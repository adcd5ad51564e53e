"""The plan of a parameter server: its workers, its servers, and the bytes of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from unisono.parallel.parameter_server.byte_ranges import ByteRange


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTraffic:
    """Bytes of gradients and parameters that a rank exchanges with other ranks in one step."""

    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """The workers, and the server of each shard, as ranks of the first group.

    >>> shards = (ByteRange(start=0, stop=8), ByteRange(start=8, stop=16))
    >>> plan = ServerPlan(workers=(0, 1, 2, 3), owners=(4, 5), shards=shards)
    >>> plan.traffic(0), plan.traffic(4)  # B each way; N B / S each way
    (RankTraffic(sent_bytes=16, received_bytes=16), RankTraffic(sent_bytes=32, received_bytes=32))
    """

    workers: tuple[int, ...]
    owners: tuple[int, ...]
    """The rank that serves each shard."""
    shards: tuple[ByteRange, ...]

    def shards_of(self, rank: int) -> tuple[int, ...]:
        """Returns the numbers of the shards that a rank serves."""
        return tuple(shard for shard, owner in enumerate(self.owners) if owner == rank)

    def traffic(self, rank: int) -> RankTraffic:
        """Returns the bytes that a rank sends and receives in a step of all workers.

        With N workers, S dedicated servers and B bytes of parameters, a worker exchanges B bytes
        each way, and a server N B / S. If S of the N workers serve, each of these exchanges
        (N + S - 2) B / S bytes each way, and each other worker B.
        """
        pushed = pulled = 0
        for shard, owner in zip(self.shards, self.owners, strict=True):
            if rank in self.workers and rank != owner:
                pushed += shard.nbytes
            if rank == owner:
                pulled += shard.nbytes * sum(worker != rank for worker in self.workers)
        # Gradients go out and parameters come in on a worker; on a server it is the reverse.
        return RankTraffic(sent_bytes=pushed + pulled, received_bytes=pushed + pulled)

    def without(
        self, lost: Sequence[int], left: Sequence[int], newest: Mapping[int, Mapping[int, int]]
    ) -> ServerPlan:
        """Returns the plan after a loss of ranks.

        `left`: the remaining ranks. `newest[shard][rank]`: step of the newest snapshot of a lost
        server's shard that the rank can read. The shard goes to a server that can read its newest
        snapshot; among several servers to that with the fewest bytes, then with the lowest number.
        A worker becomes a server if no server can read a snapshot. Raises `ValueError` if no rank
        can read one.
        """
        owners = list(self.owners)
        for shard, owner in enumerate(self.owners):
            if owner in lost:
                able = newest.get(shard, {})
                serving = [rank for rank in left if rank in self.owners]
                candidates = [rank for rank in serving if rank in able]
                candidates = candidates or [rank for rank in left if rank in able]
                if not candidates:
                    raise ValueError(f"no rank of {list(left)} can read a snapshot of it")
                best = max(able[rank] for rank in candidates)
                load = replace(self, owners=tuple(owners)).load
                owners[shard] = min(
                    (rank for rank in candidates if able[rank] == best),
                    key=lambda rank: (load(rank), rank),
                )
        workers = tuple(worker for worker in self.workers if worker not in lost)
        return replace(self, workers=workers, owners=tuple(owners))

    def load(self, rank: int) -> int:
        """Returns the bytes of the shards that a rank serves."""
        return sum(self.shards[shard].nbytes for shard in self.shards_of(rank))


def choose_servers(size: int, servers: int | Sequence[int], *, dedicated: bool) -> tuple[int, ...]:
    """Returns the ranks of the servers.

    If `servers` is a number, dedicated servers are the last ranks. Servers that are workers too are
    spread evenly over the ranks, so that each host has some. Raises `ValueError` for wrong ranks or
    numbers, and if no rank remains as a worker.

    >>> choose_servers(6, 2, dedicated=True), choose_servers(4, 2, dedicated=False)
    ((4, 5), (0, 2))
    >>> choose_servers(4, [3], dedicated=False)
    (3,)
    """
    if isinstance(servers, int):
        most = size - 1 if dedicated else size
        if not 1 <= servers <= most:
            raise ValueError(f"servers: expected 1 to {most} of {size} ranks, found {servers}")
        if dedicated:
            return tuple(range(size - servers, size))
        return tuple(i * size // servers for i in range(servers))
    found = tuple(servers)
    if not found or len(set(found)) != len(found) or not all(0 <= rank < size for rank in found):
        raise ValueError(
            f"servers: expected different ranks of 0 to {size - 1}, found {list(found)}"
        )
    if dedicated and len(found) == size:
        raise ValueError("servers: expected a rank that works, found only dedicated servers")
    return found

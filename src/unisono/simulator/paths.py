"""Resources that a message uses: the links of its path, and the ports of its source and
destination."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UnsupportedError
from unisono.simulator.conditions import Conditions, Endpoint
from unisono.topology import Floats, Ints, Ragged, Topology, counting, ints, starts_of

_BATCH = 1 << 17
"""Number of paths computed in one batch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NetworkPaths:
    """A topology under given conditions. Resources are numbered: first the links, then the ports of
    ranks.

    `links` maps links of `topology` to their ids in `original`, the intact network.
    """

    original: Topology
    topology: Topology
    links: Ints
    endpoints: tuple[Endpoint, ...]
    conditions: Conditions

    @classmethod
    def of(cls, topology: Topology, conditions: Conditions) -> NetworkPaths:
        """Applies conditions to a topology. Raises `ValueError` for links or ranks that do not
        exist."""
        for link in (*conditions.failed, *conditions.degraded):
            if not 0 <= link < len(topology.links):
                raise ValueError(
                    f"{topology.name}: link {link} does not exist; there are "
                    f"{len(topology.links)} links"
                )
        for rank in conditions.endpoints:
            if not 0 <= rank < topology.num_ranks:
                raise ValueError(
                    f"{topology.name}: rank {rank} does not exist; there are "
                    f"{topology.num_ranks} ranks"
                )
        model = conditions.messages
        found = topology if model is None else model.network(topology)
        rate = found.links.bandwidth_Bps.copy()
        for link, part in conditions.degraded.items():
            rate[link] *= part
        links = np.arange(len(topology.links))
        found = found.with_links(bandwidth_Bps=rate) if conditions.degraded else found
        if conditions.failed:
            links = np.delete(links, ints(list(conditions.failed)))
            found = found.without(conditions.failed)
        ranks = range(topology.num_ranks)
        endpoints = tuple(conditions.endpoint_of(rank) for rank in ranks)
        return cls(
            original=topology,
            topology=found,
            links=links,
            endpoints=endpoints,
            conditions=conditions,
        )

    @property
    def num_links(self) -> int:
        """Number of directed links."""
        return len(self.topology.links)

    def of_endpoints(self, name: str) -> Floats:
        """Returns one field of every rank's endpoint."""
        return np.array([getattr(endpoint, name) for endpoint in self.endpoints], np.float64)

    def capacity(self) -> Floats:
        """Returns the rate of each resource: of links, sending ports, receiving ports and reduction
        units."""
        ports = [self.of_endpoints(name) for name in ("send_Bps", "receive_Bps", "reduce_Bps")]
        return np.concatenate([self.topology.links.bandwidth_Bps, *ports])

    def port(self, number: int, rank: Ints) -> Ints:
        """Returns the resource number of a rank's sending port (`number` 0), receiving port (1) or
        reduction unit (2)."""
        return ints(self.num_links + number * self.topology.num_ranks + rank)

    def routes(self, src: Ints, dst: Ints, channel: Ints) -> Iterator[tuple[Ragged, Floats]]:
        """Yields the links that each message uses, with the fraction of the message on each link,
        in batches.

        Each channel is a separate flow: the choice among equal paths depends on the channel. Raises
        `UnsupportedError` if two ranks are not connected.
        """
        paths = self.conditions.paths
        for first in range(0, len(src), _BATCH):
            some = slice(first, first + _BATCH)
            if paths == 1:
                found = self._one(src[some], dst[some], channel[some], 0)
                yield found, np.ones(len(found[0]))
            else:
                each = [self._one(src[some], dst[some], channel[some], i) for i in range(paths)]
                yield _spread(each)

    def _one(self, src: Ints, dst: Ints, channel: Ints, choice: int) -> Ragged:
        base = self.conditions.seed + (choice << 20)
        try:
            if not channel.any():
                return self.topology.routes(src, dst, seed=base)
            parts = []
            for one in np.unique(channel).tolist():
                rows = np.flatnonzero(channel == one)
                parts.append((rows, self.topology.routes(src[rows], dst[rows], seed=base + one)))
        except ValueError as error:
            raise UnsupportedError(str(error)) from error
        return _merge_rows(parts, len(src))


def _merge_rows(parts: list[tuple[Ints, Ragged]], total: int) -> Ragged:
    """Merges several collections of lists into one collection. Each collection comes with the row
    numbers that its lists have in the result."""
    counts = np.zeros(total, np.int64)
    for rows, (_, starts) in parts:
        counts[rows] = np.diff(starts)
    begin = starts_of(counts)
    values = np.empty(begin[-1], np.int64)
    for rows, (found, starts) in parts:
        lengths = np.diff(starts)
        values[np.repeat(begin[rows], lengths) + counting(lengths)] = found
    return values, begin


def _spread(each: list[Ragged]) -> tuple[Ragged, Floats]:
    """Merges several paths of each message into one list of links, with the fraction of the message
    on each link."""
    rows = np.concatenate([np.repeat(np.arange(len(s) - 1), np.diff(s)) for _, s in each])
    values = np.concatenate([found for found, _ in each])
    width = int(values.max(initial=0)) + 1
    keys, counts = np.unique(rows * width + values, return_counts=True)
    lengths = np.bincount(keys // width, minlength=len(each[0][1]) - 1)
    return (ints(keys % width), starts_of(ints(lengths))), counts / len(each)


@dataclass(frozen=True, kw_only=True, eq=False)
class Paths:
    """Paths as columns, in the form that the engine expects; see `csrc/simulator/event_loop.h`."""

    values: NDArray[np.int32]
    starts: Ints
    weights: Floats
    server: NDArray[np.int32]
    busy_s: Floats
    delay_s: Floats
    tail_s: Floats


class PathBuilder:
    """Collects paths in blocks of columns, numbered consecutively across blocks."""

    def __init__(self, network: NetworkPaths) -> None:
        self.network = network
        self.size = 0
        self._blocks: list[Paths] = []
        self.instant = self.delays(np.zeros(1))
        """The path that takes no time."""

    def delays(self, seconds: Floats) -> int:
        """Adds paths that take time but no resource. Returns the number of the first path."""
        count = len(seconds)
        none, zero = np.full(count, -1, np.int32), np.zeros(count)
        # The time is a latency at the end of the path, so a task begins before this time passes.
        nothing = (ints([]), np.zeros(count + 1, np.int64))
        return self._add(nothing, np.ones(0), none, zero, tail=seconds)

    def through(self, resources: Ints) -> int:
        """Adds paths that use one resource each. Returns the number of the first path."""
        count = len(resources)
        starts, none = np.arange(count + 1), np.full(count, -1, np.int32)
        return self._add((resources, starts), np.ones(count), none, np.zeros(count))

    def messages(self, src: Ints, dst: Ints, channel: Ints, wait_s: Floats | None = None) -> int:
        """Adds paths between ranks. `wait_s` is added to the endpoint's overhead. Returns the
        number of the first path."""
        first, done = self.size, 0
        for links, weights in self.network.routes(src, dst, channel):
            count = len(links[1]) - 1
            rows = slice(done, done + count)
            self.along(
                links,
                weights,
                src[rows],
                dst[rows],
                wait_s=None if wait_s is None else wait_s[rows],
            )
            done += count
        return first

    def along(
        self,
        links: Ragged,
        weights: Floats,
        src: Ints,
        dst: Ints,
        *,
        cap: Ints | None = None,
        wait_s: Floats | None = None,
    ) -> int:
        """Adds paths between ranks over these links. If `cap` is given, path i also uses resource
        `cap[i]`, which limits the rate of the path.

        Returns the number of the first path.
        """
        network = self.network
        latency = _sums(weights * network.topology.links.latency_s[links[0]], links[1])
        if cap is not None:
            links, weights = _insert_ports(links, weights, cap, np.ones(len(cap), np.bool_), False)
        for number, ends, front in ((0, src, True), (1, dst, False)):
            rate = network.of_endpoints(("send_Bps", "receive_Bps")[number])
            limited = np.isfinite(rate[ends])
            links, weights = _insert_ports(
                links, weights, network.port(number, ends), limited, front
            )
        return self.over(links, weights, src, latency, wait_s)

    def over(
        self,
        resources: Ragged,
        weights: Floats,
        src: Ints,
        latency_s: Floats,
        wait_s: Floats | None = None,
    ) -> int:
        """Adds paths of messages from ranks `src` over these resources. Returns the number of the
        first path."""
        busy = self.network.of_endpoints("busy_s")[src]
        server = np.where(busy > 0, src, -1).astype(np.int32)
        delay = self.network.of_endpoints("overhead_s")[src]
        if wait_s is not None:
            delay = delay + wait_s
        return self._add(resources, weights, server, delay, busy, latency_s)

    def _add(
        self,
        links: Ragged,
        weights: Floats,
        server: NDArray[np.int32],
        delay: Floats,
        busy: Floats | None = None,
        tail: Floats | None = None,
    ) -> int:
        first, zero = self.size, np.zeros(len(server))
        self._blocks.append(
            Paths(
                values=links[0].astype(np.int32),
                starts=links[1],
                weights=weights,
                server=server,
                busy_s=zero if busy is None else busy,
                delay_s=delay,
                tail_s=zero if tail is None else tail,
            )
        )
        self.size += len(server)
        return first

    def build(self) -> Paths:
        """Returns all paths. Weights are omitted if all are 1."""
        blocks = self._blocks
        lengths = np.concatenate([np.diff(block.starts) for block in blocks])
        unweighted = all((block.weights == 1).all() for block in blocks)

        def column(name: str) -> NDArray[np.float64]:
            return np.concatenate([getattr(block, name) for block in blocks])

        return Paths(
            values=np.concatenate([block.values for block in blocks]),
            starts=starts_of(lengths),
            weights=np.empty(0) if unweighted else column("weights"),
            server=np.concatenate([block.server for block in blocks]),
            busy_s=column("busy_s"),
            delay_s=column("delay_s"),
            tail_s=column("tail_s"),
        )


def _sums(values: Floats, starts: Ints) -> Floats:
    """Returns the sum of each list. Equal lists have bit-identical sums."""
    count = len(starts) - 1
    owner = np.repeat(np.arange(count), np.diff(starts))
    return np.bincount(owner, values, minlength=count).astype(np.float64)


def _insert_ports(
    links: Ragged, weights: Floats, port: Ints, which: NDArray[np.bool_], front: bool
) -> tuple[Ragged, Floats]:
    """Inserts a port at the front or end of each list that `which` selects."""
    if not which.any():
        return links, weights
    values, starts = links
    at = (starts[:-1] if front else starts[1:])[which]
    lengths = np.diff(starts) + which
    return (np.insert(values, at, port[which]), starts_of(ints(lengths))), np.insert(
        weights, at, 1.0
    )

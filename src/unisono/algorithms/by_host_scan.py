"""Prefix reductions (scan and exscan) for several hosts, with one exchange between hosts.

Each host sends prefixes to every other host. A prefix is the reduction over all ranks of the host
below some rank. If the ranks of a host are consecutive, the host sends a single prefix, its total.
n is the number of ranks, H the number of hosts, L the number of ranks of the largest host. N is the
size of the whole vector in bytes. "Bytes" is an upper bound for the busiest rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from unisono.algorithms.cost import Cost
from unisono.algorithms.host_layout import HostLayout, Hosts
from unisono.algorithms.registry import algorithm
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _cost(ranks: int, *, hosts: Hosts | None = None) -> Cost:
    layout = HostLayout.of(ranks, hosts)
    others, most = len(layout.hosts) - 1, max(layout.sizes)
    # A rank sends to all higher ranks of its host, and to one rank of every other host. That rank
    # forwards the prefix to the ranks of its host.
    inside = (most - 1) * (2 if others else 1)
    return Cost(
        rounds=min(others, 1) * (1 + layout.shared) + layout.shared,
        bytes_sent=Fraction(inside + others + (most - 1) * others),
        reductions=Fraction(most - 1 + others),
    )


def _exscan_cost(ranks: int, *, hosts: Hosts | None = None) -> Cost:
    layout = HostLayout.of(ranks, hosts)
    found = _cost(ranks, hosts=hosts)
    return Cost(
        rounds=layout.shared + 1 + (len(layout.hosts) > 1),
        bytes_sent=found.bytes_sent + 1,
        reductions=found.reductions,
    )


@algorithm(Op.SCAN, "by_host", cost=_cost, exact=False)
def scan(ranks: int, *, hosts: Hosts | None = None) -> Schedule:
    """Scans inside each host, exchanges prefixes between hosts, then reduces these prefixes into
    the result of each rank.

    Rounds: 1 between hosts, and 2 inside. Bytes: (H+1)(L-1) x N + (H-1) x N. Reductions: (L-1) x N
    + (H-1) x N. Source: Sanders and Träff, "Parallel prefix (scan) algorithms for MPI" (2006), on
    hosts, here for any order of ranks.
    """
    return _Scan(Op.SCAN, HostLayout.of(ranks, hosts)).build()


@algorithm(Op.EXSCAN, "by_host", cost=_exscan_cost, exact=False)
def exscan(ranks: int, *, hosts: Hosts | None = None) -> Schedule:
    """Scans inside each host, copies each prefix to the next rank of the host, then exchanges
    prefixes between hosts.

    Rounds: 1 between hosts, and 2 inside. Bytes: about (H+1)(L-1) x N + H x N. Reductions: (L-1) x
    N + (H-1) x N. Source: Sanders and Träff (2006), as for scan.
    """
    return _Scan(Op.EXSCAN, HostLayout.of(ranks, hosts)).build()


class _Scan:
    """Builder of the schedules of scan and exscan.

    Location 0 of a rank (see `Schedule`) contains its vector. Location 1 + h contains a prefix of
    host h.
    """

    def __init__(self, op: Op, layout: HostLayout) -> None:
        collective = Collective(op=op, ranks=layout.ranks)
        self.exclusive = op is Op.EXSCAN
        self.layout = layout
        self.builder = Builder(collective, "by_host", scratch=len(layout.hosts))
        self.holds_prefix: set[int] = set()
        """Ranks whose vector is a prefix and no longer their own contribution."""

    def build(self) -> Schedule:
        """Returns the schedule: a scan inside each host, the exchange of prefixes, and the last
        reductions.
        """
        b = self.builder
        for host in self.layout.hosts:
            ranks = np.array(host)
            below, above = np.triu_indices(len(ranks), k=1)
            b.reduce(ranks[below], 0, ranks[above])
        b.round += self.layout.shared
        if self.exclusive:
            for host in self.layout.hosts:
                ranks = np.array(host)
                b.copy(ranks[:-1], 0, ranks[1:])
                self.holds_prefix.update(host[1:])
        adds = list(self._exchange_prefixes())
        b.next_round()
        for holder, location, rank in adds:
            b.reduce(holder, location, rank, 0)
        return b.build()

    def _exchange_prefixes(self) -> Iterator[tuple[int, int, int]]:
        """Adds the transfers of prefixes between hosts.

        Yields (rank that receives a prefix, location of the prefix on this rank, rank that must
        still reduce the prefix into its result).
        """
        hosts = self.layout.hosts
        for here, host in enumerate(hosts):
            for other, ranks in enumerate(hosts):
                if other == here:
                    continue
                needed: dict[int, list[int]] = {}
                for rank in host:
                    needed.setdefault(bisect_left(ranks, rank), []).append(rank)
                needed.pop(0, None)  # ranks below the whole other host need no prefix of it
                for below, by in needed.items():
                    location = self._copy_prefix(ranks[below - 1], by, 1 + other)
                    first = by if location > 0 else by[1:]
                    yield from ((by[0], location, rank) for rank in first)

    def _copy_prefix(self, src: int, by: list[int], spare: int) -> int:
        """Copies a prefix to the first rank that needs the prefix. Returns the location from which
        the other ranks read the prefix.
        """
        b, first = self.builder, by[0]
        if not self.exclusive and len(by) == 1:
            b.reduce(src, 0, first)
            return 0
        location = spare
        if self.exclusive and first not in self.holds_prefix:
            self.holds_prefix.add(first)
            location = 0
        b.copy(src, 0, first, location)
        return location

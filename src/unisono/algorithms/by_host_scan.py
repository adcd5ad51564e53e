"""Prefix reductions for several hosts, with one exchange between hosts.

Each host sends prefixes to each other host: reductions over its ranks below some rank. If the ranks
of a host are consecutive, the host sends a single prefix, its total. n is the number of ranks, H
the number of hosts, L the number of ranks of the largest host. N is the bytes of the whole vector.
Bytes are an upper bound for the busiest rank.
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
    # A rank sends to all higher ranks of its host and to one rank of each other host, which
    # forwards the prefix to its host.
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
    """Scan inside each host, exchange of prefixes between hosts, then addition of the prefixes to
    each rank.

    Rounds: 1 between hosts, and 2 inside. Bytes: (H+1)(L-1) x N + (H-1) x N. Reductions: (L-1) x N
    + (H-1) x N. Source: Sanders and Träff, "Parallel prefix (scan) algorithms for MPI" (2006), on
    hosts, here for any order of ranks.
    """
    return _Scan(Op.SCAN, HostLayout.of(ranks, hosts)).build()


@algorithm(Op.EXSCAN, "by_host", cost=_exscan_cost, exact=False)
def exscan(ranks: int, *, hosts: Hosts | None = None) -> Schedule:
    """Like scan, but a rank starts with the prefix of the next lower rank on its host.

    Rounds: 1 between hosts, and 2 inside. Bytes: about (H+1)(L-1) x N + H x N. Reductions: (L-1) x
    N + (H-1) x N. Source: Sanders and Träff (2006), as for scan.
    """
    return _Scan(Op.EXSCAN, HostLayout.of(ranks, hosts)).build()


class _Scan:
    """Builder of the schedules. Location 0 of a rank is its vector. Location 1 + h is a prefix of
    host h.
    """

    def __init__(self, op: Op, layout: HostLayout) -> None:
        collective = Collective(op=op, ranks=layout.ranks)
        self.exclusive = op is Op.EXSCAN
        self.layout = layout
        self.builder = Builder(collective, "by_host", scratch=len(layout.hosts))
        self.holds_prefix: set[int] = set()
        """Ranks whose vector already is a prefix instead of their own contribution."""

    def build(self) -> Schedule:
        """Returns the schedule."""
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
        """Adds the exchange of prefixes.

        Yields (rank that has the prefix, location, rank that also needs the prefix).
        """
        hosts = self.layout.hosts
        for here, host in enumerate(hosts):
            for other, ranks in enumerate(hosts):
                if other == here:
                    continue
                needed: dict[int, list[int]] = {}
                for rank in host:
                    needed.setdefault(bisect_left(ranks, rank), []).append(rank)
                needed.pop(0, None)  # the other host has no rank below
                for below, by in needed.items():
                    location = self._copy_prefix(ranks[below - 1], by, 1 + other)
                    first = by if location > 0 else by[1:]
                    yield from ((by[0], location, rank) for rank in first)

    def _copy_prefix(self, src: int, by: list[int], spare: int) -> int:
        """Copies a prefix to the first rank that needs it. Returns the location for the other
        ranks.
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

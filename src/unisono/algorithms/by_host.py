"""For ranks on several hosts, any number on each: every host sends as little as can be.

What leaves a host was reduced there before, what comes to it is spread there by shared memory, and
all ranks of a host take an equal part in what goes between hosts. n is the number of ranks, H that
of hosts, L_h and L the ranks of host h and of the largest, N the bytes of the whole vector; bytes
are those the busiest rank sends, "per host" those that a host sends and those that it receives.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import lcm

import numpy as np

from unisono.algorithms.compose import Composer, backwards
from unisono.algorithms.cost import Cost, largest
from unisono.algorithms.cost import backwards as backwards_cost
from unisono.algorithms.host_layout import HostLayout, Hosts
from unisono.algorithms.registry import algorithm, build, cost
from unisono.errors import UnsupportedError
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op

_DIRECT, _RING = "direct", "ring"


def _all_reduce_cost(
    ranks: int, *, between: str = _DIRECT, inside: str = _DIRECT, hosts: Hosts | None = None
) -> Cost:
    layout = HostLayout.of(ranks, hosts)
    columns = layout.columns
    most = max(_share(columns, size) for size in layout.sizes)
    total = cost(Op.ALL_REDUCE, between, ranks=len(layout.hosts)).on(most)
    for op in (Op.REDUCE_SCATTER, Op.ALL_GATHER):
        total += largest(
            cost(op, inside, ranks=size).on(_share(columns, size) * size) for size in layout.sizes
        )
    return total


def _all_gather_cost(ranks: int, *, between: str | None = None, hosts: Hosts | None = None) -> Cost:
    layout = HostLayout.of(ranks, hosts)
    others, ring = len(layout.hosts) - 1, _way(layout, between) == _RING
    parts, most = _parts(layout), Fraction(0)
    for size in layout.sizes:
        brought = Fraction(-(-(ranks - size) * parts // size), parts)  # pieces, to the busiest
        away = 1 + brought if ring else Fraction(others)
        most = max(most, away + (size - 1) * (1 + brought))
    rounds = (others if ring else min(others, 1)) + layout.shared
    return Cost(rounds=rounds, bytes_sent=most / ranks)


def _reduce_scatter_cost(
    ranks: int, *, between: str | None = None, hosts: Hosts | None = None
) -> Cost:
    return backwards_cost(_all_gather_cost(ranks, between=between, hosts=hosts), ranks)


def _broadcast_cost(ranks: int, *, hosts: Hosts | None = None) -> Cost:
    layout = HostLayout.of(ranks, hosts)
    many, columns = len(layout.hosts) > 1, layout.columns
    most = max(size - 1 + many * _share(columns, size) for size in layout.sizes)
    inside = layout.shared * (2 if many else 1)
    return Cost(rounds=min(len(layout.hosts) - 1, 2) + inside, bytes_sent=Fraction(most))


def _reduce_cost(ranks: int, *, hosts: Hosts | None = None) -> Cost:
    gather = _broadcast_cost(ranks, hosts=hosts)
    return Cost(rounds=gather.rounds, bytes_sent=Fraction(1), reductions=gather.bytes_sent)


@algorithm(Op.ALL_REDUCE, "by_host", cost=_all_reduce_cost, exact=False)
def all_reduce(
    ranks: int, *, between: str = _DIRECT, inside: str = _DIRECT, hosts: Hosts | None = None
) -> Schedule:
    """Reduce-scatter inside each host, all-reduce each share between hosts, all-gather inside.

    `between` is any all-reduce, `inside` any algorithm of reduce-scatter and of all-gather.

    Rounds: 4 (2 with a rank a host). Bytes: about 2(L-1)/L x N + 2(H-1)/H x N/L; per host
    2(H-1)/H x N, the least that there is. Reductions: about half of it. Source: Cho et al.,
    "BlueConnect: decomposing all-reduce for deep learning on heterogeneous network hierarchy"
    (2019), here for hosts that differ; Hidayetoglu et al., "HiCCL: a hierarchical collective
    communication library" (2024).
    """
    layout = HostLayout.of(ranks, hosts)
    columns = layout.columns
    sizes = set(layout.sizes)
    up = {size: build(Op.REDUCE_SCATTER, inside, ranks=size) for size in sizes}
    down = {size: build(Op.ALL_GATHER, inside, ranks=size) for size in sizes}
    top = build(Op.ALL_REDUCE, between, ranks=len(layout.hosts))
    unit = lcm(*(part.collective.parts for part in (*up.values(), *down.values(), top)))
    collective = Collective(op=Op.ALL_REDUCE, ranks=ranks, parts=columns * unit)
    composer = Composer(collective, unit)
    start = _inside(composer, layout, up, 0)
    for column in range(columns):
        line = [layout.worker(host, column, columns) for host in range(len(layout.hosts))]
        composer.add(top, line, [[column]], start=start)
    _inside(composer, layout, down, start + top.num_rounds)
    return composer.build()


@algorithm(Op.ALL_GATHER, "by_host", cost=_all_gather_cost, exact=False)
def all_gather(ranks: int, *, between: str | None = None, hosts: Hosts | None = None) -> Schedule:
    """A piece goes to one rank of each other host, a different one for each piece, and from there
    to all ranks of the host.

    `between` is direct, or ring: from host to host. By default direct, unless some host has so many
    more ranks than others that sending their pieces H-1 times would be its bound.

    Rounds: 2 (1 with a rank a host), H along the ring. Bytes: about N, (L-1)/n x N of it for what
    comes from other hosts; per host in (n - L_h)/n x N, the least that there is, out (H-1)L_h/n x N
    direct, at most N on the ring. Source: Träff, "Efficient allgather for regular
    SMP-clusters" (2006), here for hosts that differ.
    """
    layout = HostLayout.of(ranks, hosts)
    ring, parts = _way(layout, between) == _RING, _parts(layout)
    stations = _stations(layout, parts)
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=ranks, parts=parts), "by_host")
    count = len(layout.hosts)
    chunk = np.arange(ranks * parts)
    for number, host in enumerate(layout.hosts):
        held = np.isin(chunk // parts, host)
        own = chunk[held]
        at = before = own // parts
        others = [(number + distance) % count for distance in range(1, count)]
        b.round = 0
        _spread(b, np.array(host), own, at)
        if others and not ring:
            b.copy(at, own, np.array([stations[there][held] for there in others]))
        for there in others:
            if ring:
                b.copy(before, own, stations[there][held])
            before = stations[there][held]
            b.next_round()
            _spread(b, np.array(layout.hosts[there]), own, before)
            b.round -= not ring  # direct: all at once
    return b.build()


@algorithm(Op.REDUCE_SCATTER, "by_host", cost=_reduce_scatter_cost, exact=False)
def reduce_scatter(
    ranks: int, *, between: str | None = None, hosts: Hosts | None = None
) -> Schedule:
    """A piece is reduced inside each host, by a different rank for each piece, and then at the rank
    that it is for. `between` as for all-gather, which is this backwards.

    Rounds: 2 (1 with a rank a host), H along the ring. Bytes: (n-1)/n x N; per host out
    (n - L_h)/n x N, the least that there is, in (H-1)L_h/n x N direct, at most N on the ring.
    Reductions: about N. Source: Cho et al. (2019), here for hosts that differ.
    """
    return backwards(all_gather(ranks, between=between, hosts=hosts))


@algorithm(Op.BROADCAST, "by_host", cost=_broadcast_cost, exact=False)
def broadcast(ranks: int, root: int, *, hosts: Hosts | None = None) -> Schedule:
    """The root's host sends each other host a different share, and these send it on to each other.

    Rounds: 4 (2 with a rank a host; less for two hosts). Bytes: (L-1) x N + N/L at the root; per
    host in N, out at most N, the least that there is. Source: van de Geijn's broadcast by scatter
    and all-gather, Barnett et al., "Interprocessor collective communication library (InterCom)"
    (1994), between hosts.
    """
    layout = HostLayout.of(ranks, hosts)
    home, columns = layout.home(root), layout.columns
    others = [host for host in range(len(layout.hosts)) if host != home]
    shares = max(1, len(others))
    b = Builder(Collective(op=Op.BROADCAST, ranks=ranks, root=root, parts=shares * columns), "")
    for rank in layout.hosts[home]:
        if rank != root:
            b.copy(root, 0, rank, count=shares * columns)
    b.round += layout.sizes[home] > 1
    column = np.arange(columns)
    at = np.array(
        [
            [layout.worker(host, c, columns) for c in range(columns)]
            for host in range(len(layout.hosts))
        ]
    )
    for share, host in enumerate(others):
        b.copy(at[home], share * columns + column, at[host])
    b.next_round()
    for share, host in enumerate(others):
        b.copy(at[host], share * columns + column, at[[h for h in others if h != host]])
    b.round += len(others) > 1
    for host in others:
        chunk = np.arange(shares * columns)
        _spread(b, np.array(layout.hosts[host]), chunk, at[host][chunk % columns])
    return b.build()


@algorithm(Op.REDUCE, "by_host", cost=_reduce_cost, exact=False)
def reduce(ranks: int, root: int, *, hosts: Hosts | None = None) -> Schedule:
    """Inside each host, then shares between the other hosts, then all at the root's: a broadcast
    backwards.

    Rounds: 4 (2 with a rank a host; less for two hosts). Bytes: N; per host out N, in at most N,
    the least that there is. Reductions: (L-1) x N + N/L at the root. Source: Barnett et al. (1994),
    backwards.
    """
    return backwards(broadcast(ranks, root, hosts=hosts))


def _inside(
    composer: Composer, layout: HostLayout, parts: Mapping[int, Schedule], start: int
) -> int:
    """Puts in the part for its size on each host; returns the round after the longest."""
    columns = layout.columns
    for number, host in enumerate(layout.hosts):
        if len(host) > 1:
            composer.add(parts[len(host)], host, layout.worked(number, columns), start=start)
    return start + max(part.num_rounds for part in parts.values())


def _share(columns: int, size: int) -> Fraction:
    """The largest share of the columns that a rank of a host of this size works on."""
    return Fraction(-(-columns // size), columns)


def _parts(layout: HostLayout) -> int:
    """In how many a piece is cut, so that there is one from elsewhere for each rank of a host."""
    foreign = [(size, layout.ranks - size) for size in layout.sizes if size < layout.ranks]
    return max((-(-size // others) for size, others in foreign), default=1)


def _stations(layout: HostLayout, parts: int) -> list[np.ndarray]:
    """For each host and chunk the rank to which it comes first; of foreign chunks each rank of the
    host gets as many as the others, neighbours together."""
    owner = np.repeat(np.arange(layout.ranks), parts)
    found = []
    for host in layout.hosts:
        ranks = np.array(host)
        foreign = ~np.isin(owner, ranks)
        turn = np.cumsum(foreign) - 1
        total = max(1, int(foreign.sum()))
        found.append(np.where(foreign, ranks[turn * len(ranks) // total % len(ranks)], owner))
    return found


def _spread(
    b: Builder,
    host: np.ndarray,
    chunk: np.ndarray,
    at: np.ndarray,
) -> None:
    """Copies each chunk from where it is to all other ranks of the host."""
    if len(host) == 1:
        return  # it is there already
    rank, which = np.nonzero(host[:, None] != at[None, :])
    b.copy(at[which], chunk[which], host[rank])


def _way(layout: HostLayout, between: str | None) -> str:
    """How pieces go between hosts. Raises `UnsupportedError`."""
    if between is None:
        direct = (len(layout.hosts) - 1) * max(layout.sizes)
        return _DIRECT if direct <= layout.ranks - min(layout.sizes) else _RING
    if between not in (_DIRECT, _RING):
        raise UnsupportedError(f"by_host: between: expected direct or ring, got {between!r}")
    return between

"""Algorithms for several hosts with any numbers of ranks, which minimise the network traffic of
every host.

Data are reduced inside a host before they leave the host. Data that arrive are distributed through
shared memory. The traffic between hosts is divided equally among the ranks of a host. n is the
number of ranks, H the number of hosts. L_h is the number of ranks of host h, L the largest L_h. N
is the size of the whole vector in bytes. In the docstrings below, "Bytes" is the number of bytes
that the busiest rank sends. "Per host" is the number of bytes that a host sends or receives.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import lcm

import numpy as np

from unisono.algorithms.cost import Cost, largest
from unisono.algorithms.cost import backwards as backwards_cost
from unisono.algorithms.host_layout import HostLayout, Hosts
from unisono.algorithms.registry import algorithm, build, cost
from unisono.algorithms.schedule_composition import Composer, backwards
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
    others, ring = len(layout.hosts) - 1, _pattern(layout, between) == _RING
    parts, most = _parts(layout), Fraction(0)
    for size in layout.sizes:
        # Pieces that the busiest rank of the host receives from other hosts.
        received = Fraction(-(-(ranks - size) * parts // size), parts)
        away = 1 + received if ring else Fraction(others)
        most = max(most, away + (size - 1) * (1 + received))
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
    """Runs a reduce-scatter inside each host, then an all-reduce of each rank's share between the
    hosts, then an all-gather inside each host.

    `between` is any algorithm for all-reduce. `inside` is any algorithm for both reduce-scatter and
    all-gather.

    Rounds: 4 (2 with one rank per host). Bytes: about 2(L-1)/L x N + 2(H-1)/H x N/L; per host
    2(H-1)/H x N, the minimum. Reductions: about half of the bytes. Source: Cho et al.,
    "BlueConnect: decomposing all-reduce for deep learning on heterogeneous network hierarchy"
    (2019), here for hosts of different sizes; Hidayetoglu et al., "HiCCL: a hierarchical collective
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
    """Sends each piece to one rank of every other host. This rank sends the piece to all other
    ranks of its host. The pieces are divided equally among the ranks of a host.

    `between` is `direct`, or `ring` to pass pieces from host to host around a ring. The default is
    usually `direct`. The default is `ring` if one host is so much larger than the others that
    sending its pieces H-1 times would limit the time.

    Rounds: 2 (1 with one rank per host), H along the ring. Bytes: about N, plus (L-1)/n x N for the
    pieces of other hosts; per host (n - L_h)/n x N received, the minimum; (H-1)L_h/n x N sent
    directly, at most N sent on the ring. Source: Träff, "Efficient allgather for regular
    SMP-clusters" (2006), here for hosts of different sizes.
    """
    layout = HostLayout.of(ranks, hosts)
    ring, parts = _pattern(layout, between) == _RING, _parts(layout)
    first_receivers = _first_receivers(layout, parts)
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=ranks, parts=parts), "by_host")
    count = len(layout.hosts)
    chunk = np.arange(ranks * parts)
    for number, host in enumerate(layout.hosts):
        held = np.isin(chunk // parts, host)
        own = chunk[held]
        at = before = own // parts
        others = [(number + distance) % count for distance in range(1, count)]
        b.round = 0
        _copy_inside(b, np.array(host), own, at)
        if others and not ring:
            b.copy(at, own, np.array([first_receivers[there][held] for there in others]))
        for there in others:
            if ring:
                b.copy(before, own, first_receivers[there][held])
            before = first_receivers[there][held]
            b.next_round()
            _copy_inside(b, np.array(layout.hosts[there]), own, before)
            b.round -= not ring  # with `direct`, all hosts distribute pieces in the same round
    return b.build()


@algorithm(Op.REDUCE_SCATTER, "by_host", cost=_reduce_scatter_cost, exact=False)
def reduce_scatter(
    ranks: int, *, between: str | None = None, hosts: Hosts | None = None
) -> Schedule:
    """Reduces each piece first among the ranks of each host, then across hosts at the rank that
    owns the piece. The work on the pieces is divided equally among the ranks of a host.

    The transfers are the transfers of the all-gather with the same `between`, in reverse order and
    direction.

    Rounds: 2 (1 with one rank per host), H along the ring. Bytes: (n-1)/n x N; per host (n - L_h)/n
    x N sent, the minimum; (H-1)L_h/n x N received directly, at most N received on the ring.
    Reductions: about N. Source: Cho et al. (2019), here for hosts of different sizes.
    """
    return backwards(all_gather(ranks, between=between, hosts=hosts))


@algorithm(Op.BROADCAST, "by_host", cost=_broadcast_cost, exact=False)
def broadcast(ranks: int, root: int, *, hosts: Hosts | None = None) -> Schedule:
    """The root's host sends a different share of the vector to every other host. The other hosts
    then exchange their shares.

    Rounds: 4 (2 with one rank per host; fewer for two hosts). Bytes: (L-1) x N + N/L at the root;
    per host N received and at most N sent, the minimum. Source: van de Geijn's broadcast by scatter
    and all-gather, Barnett et al., "Interprocessor collective communication library (InterCom)"
    (1994), between hosts.
    """
    layout = HostLayout.of(ranks, hosts)
    root_host, columns = layout.root_host(root), layout.columns
    others = [host for host in range(len(layout.hosts)) if host != root_host]
    shares = max(1, len(others))
    b = Builder(Collective(op=Op.BROADCAST, ranks=ranks, root=root, parts=shares * columns), "")
    for rank in layout.hosts[root_host]:
        if rank != root:
            b.copy(root, 0, rank, count=shares * columns)
    b.round += layout.sizes[root_host] > 1
    column = np.arange(columns)
    at = np.array(
        [
            [layout.worker(host, c, columns) for c in range(columns)]
            for host in range(len(layout.hosts))
        ]
    )
    for share, host in enumerate(others):
        b.copy(at[root_host], share * columns + column, at[host])
    b.next_round()
    for share, host in enumerate(others):
        b.copy(at[host], share * columns + column, at[[h for h in others if h != host]])
    b.round += len(others) > 1
    for host in others:
        chunk = np.arange(shares * columns)
        _copy_inside(b, np.array(layout.hosts[host]), chunk, at[host][chunk % columns])
    return b.build()


@algorithm(Op.REDUCE, "by_host", cost=_reduce_cost, exact=False)
def reduce(ranks: int, root: int, *, hosts: Hosts | None = None) -> Schedule:
    """First, every host except the root's host reduces the vectors of its ranks. These hosts then
    reduce the vector across hosts, and each of them gets a different share of the result. The
    root's host receives all shares. The root reduces the shares and the vectors of its own host.
    Runs the transfers of the broadcast in reverse order and direction.

    Rounds: 4 (2 with one rank per host; fewer for two hosts). Bytes: N; per host N sent and at most
    N received, the minimum. Reductions: (L-1) x N + N/L at the root. Source: Barnett et al. (1994),
    reversed.
    """
    return backwards(broadcast(ranks, root, hosts=hosts))


def _inside(
    composer: Composer, layout: HostLayout, parts: Mapping[int, Schedule], start: int
) -> int:
    """Adds to each host the schedule in `parts` for the host's number of ranks. Returns the number
    of the first round after the longest of these schedules.
    """
    columns = layout.columns
    for number, host in enumerate(layout.hosts):
        if len(host) > 1:
            composer.add(parts[len(host)], host, layout.worked(number, columns), start=start)
    return start + max(part.num_rounds for part in parts.values())


def _share(columns: int, size: int) -> Fraction:
    """Returns the largest fraction of the vector that one rank of a host with `size` ranks
    processes. The vector is cut into `columns` equal columns.
    """
    return Fraction(-(-columns // size), columns)


def _parts(layout: HostLayout) -> int:
    """Returns the smallest number of parts into which each piece must be cut so that every rank
    receives at least one part from another host.
    """
    foreign = [(size, layout.ranks - size) for size in layout.sizes if size < layout.ranks]
    return max((-(-size // others) for size, others in foreign), default=1)


def _first_receivers(layout: HostLayout, parts: int) -> list[np.ndarray]:
    """Returns, for each host and each chunk, the rank of the host that receives the chunk first.
    The result has one array per host.

    The chunks of other hosts are divided equally among the ranks of a host. Each rank receives
    adjacent chunks.
    """
    owner = np.repeat(np.arange(layout.ranks), parts)
    found = []
    for host in layout.hosts:
        ranks = np.array(host)
        foreign = ~np.isin(owner, ranks)
        turn = np.cumsum(foreign) - 1
        total = max(1, int(foreign.sum()))
        found.append(np.where(foreign, ranks[turn * len(ranks) // total % len(ranks)], owner))
    return found


def _copy_inside(
    b: Builder,
    host: np.ndarray,
    chunk: np.ndarray,
    at: np.ndarray,
) -> None:
    """Copies each chunk from one rank of a host to all other ranks of the host. `at` contains the
    source rank of each chunk.
    """
    if len(host) == 1:
        return  # a host with a single rank needs no copies
    rank, which = np.nonzero(host[:, None] != at[None, :])
    b.copy(at[which], chunk[which], host[rank])


def _pattern(layout: HostLayout, between: str | None) -> str:
    """Returns the pattern of transfers between hosts, `direct` or `ring`. Raises `UnsupportedError`
    for any other pattern.
    """
    if between is None:
        direct = (len(layout.hosts) - 1) * max(layout.sizes)
        return _DIRECT if direct <= layout.ranks - min(layout.sizes) else _RING
    if between not in (_DIRECT, _RING):
        raise UnsupportedError(f"by_host: between: expected direct or ring, got {between!r}")
    return between

"""Leader algorithms for several hosts with any numbers of ranks: one rank of each host communicates
for the host.

These algorithms send the fewest messages between hosts. A leader collects the data of its host,
exchanges them with the other leaders, and distributes the results. Leader algorithms suit short
messages. `between` is the algorithm of the leaders. By default, up to 8 hosts exchange in one
round. For more hosts, the number of rounds is logarithmic. n is the number of ranks, H the number
of hosts, L the number of ranks of the largest host. N is the size of the whole vector in bytes. In
the docstrings below, "Bytes" is the number of bytes that a leader sends. The number is an upper
bound if the hosts have different sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from math import lcm

from unisono.algorithms.cost import BY_PART, Cost, largest
from unisono.algorithms.host_layout import HostLayout, Hosts
from unisono.algorithms.registry import algorithm, build, cost
from unisono.algorithms.schedule_composition import Composer, runs
from unisono.schedule import Collective, Schedule
from unisono.types import Op

_FEW = "direct"
_MANY = {
    Op.ALL_REDUCE: "recursive_doubling",
    Op.ALL_GATHER: "bruck",
    Op.REDUCE_SCATTER: "bruck",
    Op.ALL_TO_ALL: "bruck",
}
_TREE = "binomial_tree"


def _between(op: Op, layout: HostLayout, between: str | None) -> str:
    if between is not None:
        return between
    if layout.few:
        return "one_shot" if op is Op.ALL_REDUCE else _FEW
    return _MANY.get(op, _TREE)


def _stated(op: Op) -> Callable[..., Cost]:
    """Returns a cost function that adds the cost of the leaders' algorithm and the cost of the
    transfers inside hosts.
    """

    def stated(ranks: int, *, between: str | None = None, hosts: Hosts | None = None) -> Cost:
        layout = HostLayout.of(ranks, hosts)
        count, most = len(layout.hosts), max(layout.sizes)
        top = cost(op, _between(op, layout, between), ranks=count)
        if op not in BY_PART:
            share = most if op is Op.ALL_TO_ALL else 1
            top = top.on(Fraction(count * most * share, ranks))
        inside = Fraction(1 if op in (Op.GATHER, Op.SCATTER) else ranks, ranks)
        twice = not op.rooted and not (op is Op.ALL_TO_ALL and count == 1)
        return top + Cost(
            rounds=layout.shared * (2 if twice else 1),
            bytes_sent=layout.shared * inside * (most + (op in _COLLECTED) - 1),
            reductions=Fraction(most - 1 if op.reduces else 0),
        )

    return stated


_COLLECTED = (Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.GATHER)
"""Operations whose transfers to a leader may be larger than the transfers from the leader."""


def _all_reduce_cost(
    ranks: int, *, between: str | None = None, inside: str = _FEW, hosts: Hosts | None = None
) -> Cost:
    layout = HostLayout.of(ranks, hosts)
    total = cost(Op.ALL_REDUCE, _between(Op.ALL_REDUCE, layout, between), ranks=len(layout.hosts))
    for op in (Op.REDUCE, Op.BROADCAST):
        total += largest(cost(op, inside, ranks=size) for size in layout.sizes)
    return total


@algorithm(Op.ALL_REDUCE, "leaders", cost=_all_reduce_cost, exact=False)
def all_reduce(
    ranks: int, *, between: str | None = None, inside: str = _FEW, hosts: Hosts | None = None
) -> Schedule:
    """Reduces to the leader of each host, runs an all-reduce among the leaders, then broadcasts
    from each leader.

    `between` is any algorithm for all-reduce. `inside` is any algorithm for both reduce and
    broadcast.

    Rounds: 1 between hosts (log2(H) for more than 8), and 2 inside. Bytes: (H-1) x N + (L-1) x N.
    Reductions: the same. Source: Zhu, Goodell, Gropp, Thakur, "Hierarchical collectives in MPICH2"
    (2009); Karonis et al., "Exploiting hierarchy in parallel computer networks to optimize
    collective operation performance" (2000).
    """
    layout = HostLayout.of(ranks, hosts)
    sizes = set(layout.sizes)
    up = {size: build(Op.REDUCE, inside, ranks=size) for size in sizes}
    down = {size: build(Op.BROADCAST, inside, ranks=size) for size in sizes}
    top = _top(Op.ALL_REDUCE, layout, between)
    unit = lcm(*(part.collective.parts for part in (*up.values(), *down.values(), top)))
    composer = Composer(Collective(op=Op.ALL_REDUCE, ranks=ranks, parts=unit), unit)
    for host in layout.hosts:
        composer.add(up[len(host)], host, [[0]])
    start = max(part.num_rounds for part in up.values())
    start = composer.add(top, layout.leaders(), [[0]], start=start)
    for host in layout.hosts:
        composer.add(down[len(host)], host, [[0]], start=start)
    return composer.build()


@algorithm(Op.ALL_GATHER, "leaders", cost=_stated(Op.ALL_GATHER), exact=False)
def all_gather(ranks: int, *, between: str | None = None, hosts: Hosts | None = None) -> Schedule:
    """Gathers at the leader of each host, runs an all-gather among the leaders, then sends all
    pieces to all ranks of each host.

    Rounds: 1 between hosts (log2(H) for more than 8), and 2 inside. Bytes: about (H-1)L/n x N +
    (L-1) x N. Source: Zhu et al. (2009).
    """
    layout = HostLayout.of(ranks, hosts)
    top = _top(Op.ALL_GATHER, layout, between)
    made = _Leaders(Op.ALL_GATHER, layout, top)
    made.collect(lambda rank: [rank])
    made.exchange(top, layout.hosts)
    made.distribute(lambda rank: [piece for piece in range(ranks) if piece != rank])
    return made.composer.build()


@algorithm(Op.REDUCE_SCATTER, "leaders", cost=_stated(Op.REDUCE_SCATTER), exact=False)
def reduce_scatter(
    ranks: int, *, between: str | None = None, hosts: Hosts | None = None
) -> Schedule:
    """Reduces to the leader of each host, runs a reduce-scatter among the leaders, then sends each
    rank its piece.

    Rounds: 1 between hosts (log2(H) for more than 8), and 2 inside. Bytes: at most N to the leader,
    about (H-1)L/n x N from the leader. Reductions: (L-1) x N, and about (H-1)L/n x N. Source: Zhu
    et al. (2009).
    """
    layout = HostLayout.of(ranks, hosts)
    top = _top(Op.REDUCE_SCATTER, layout, between)
    made = _Leaders(Op.REDUCE_SCATTER, layout, top)
    made.collect(lambda rank: range(ranks))
    made.exchange(top, layout.hosts)
    made.distribute(lambda rank: [rank])
    return made.composer.build()


@algorithm(Op.ALL_TO_ALL, "leaders", cost=_stated(Op.ALL_TO_ALL), exact=False)
def all_to_all(ranks: int, *, between: str | None = None, hosts: Hosts | None = None) -> Schedule:
    """Ranks send the pieces for other hosts to their leader. The leaders run an all-to-all, then
    send each rank its pieces.

    Rounds: 1 between hosts (log2(H) for more than 8), and 2 inside. Bytes: about (H-1)L^2/n x N + L
    x N. Source: Jackson and Booth, "Planned AlltoAllv: a clustered approach" (2004).
    """
    layout = HostLayout.of(ranks, hosts)
    top = _top(Op.ALL_TO_ALL, layout, between)
    made = _Leaders(Op.ALL_TO_ALL, layout, top)
    foreign = {
        rank: [r for r in range(ranks) if r not in host] for host in layout.hosts for rank in host
    }
    for host in layout.hosts:
        for src in host:
            for dst in host:
                if src != dst:
                    made.move(src, dst, [src * ranks + dst])
    made.collect(lambda rank: [rank * ranks + dst for dst in foreign[rank]])
    bundles = [
        [src * ranks + dst for src in here for dst in there] if here != there else []
        for here in layout.hosts
        for there in layout.hosts
    ]
    made.exchange(top, bundles)
    made.distribute(lambda rank: [src * ranks + rank for src in foreign[rank]])
    return made.composer.build()


@algorithm(Op.BROADCAST, "leaders", cost=_stated(Op.BROADCAST), exact=False)
def broadcast(
    ranks: int, root: int, *, between: str | None = None, hosts: Hosts | None = None
) -> Schedule:
    """The root sends to the leaders. Each leader sends to the ranks of its host.

    Rounds: 1 between hosts (log2(H) for more than 8), and 1 inside. Bytes: (H-1) x N + (L-1) x N.
    Source: Karonis et al. (2000).
    """
    layout = HostLayout.of(ranks, hosts)
    top = _top(Op.BROADCAST, layout, between, root)
    made = _Leaders(Op.BROADCAST, layout, top, root)
    made.exchange(top, [[0]])
    made.distribute(lambda rank: [0])
    return made.composer.build()


@algorithm(Op.REDUCE, "leaders", cost=_stated(Op.REDUCE), exact=False)
def reduce(
    ranks: int, root: int, *, between: str | None = None, hosts: Hosts | None = None
) -> Schedule:
    """Each host reduces to its leader. The leaders reduce to the root.

    Rounds: 1 between hosts (log2(H) for more than 8), and 1 inside. Bytes: about N. Reductions:
    (L-1) x N + (H-1) x N at the root. Source: Karonis et al. (2000).
    """
    layout = HostLayout.of(ranks, hosts)
    top = _top(Op.REDUCE, layout, between, root)
    made = _Leaders(Op.REDUCE, layout, top, root)
    made.collect(lambda rank: [0])
    made.exchange(top, [[0]])
    return made.composer.build()


@algorithm(Op.SCATTER, "leaders", cost=_stated(Op.SCATTER), exact=False)
def scatter(
    ranks: int, root: int, *, between: str | None = None, hosts: Hosts | None = None
) -> Schedule:
    """The root sends each leader the pieces of its host. The leader sends each rank its piece. All
    pieces must have the same length.

    Rounds: 1 between hosts (log2(H) for more than 8), and 1 inside. Bytes: about N at the root.
    Source: Karonis et al. (2000).
    """
    layout = HostLayout.of(ranks, hosts)
    top = _top(Op.SCATTER, layout, between, root)
    made = _Leaders(Op.SCATTER, layout, top, root)
    made.exchange(top, layout.hosts)
    made.distribute(lambda rank: [rank])
    return made.composer.build()


@algorithm(Op.GATHER, "leaders", cost=_stated(Op.GATHER), exact=False)
def gather(
    ranks: int, root: int, *, between: str | None = None, hosts: Hosts | None = None
) -> Schedule:
    """Each leader gathers the pieces of its host. The root gathers from the leaders. All pieces
    must have the same length.

    Rounds: 1 between hosts (log2(H) for more than 8), and 1 inside. Bytes: about L/n x N. Source:
    Karonis et al. (2000).
    """
    layout = HostLayout.of(ranks, hosts)
    top = _top(Op.GATHER, layout, between, root)
    made = _Leaders(Op.GATHER, layout, top, root)
    made.collect(lambda rank: [rank])
    made.exchange(top, layout.hosts)
    return made.composer.build()


def _top(op: Op, layout: HostLayout, between: str | None, root: int | None = None) -> Schedule:
    root_host = 0 if root is None else layout.root_host(root)
    return build(op, _between(op, layout, between), ranks=len(layout.hosts), root=root_host)


class _Leaders:
    """Builder of schedules with three steps: transfers to the leaders, between leaders, and from
    the leaders.
    """

    def __init__(self, op: Op, layout: HostLayout, top: Schedule, root: int | None = None) -> None:
        unit = top.collective.parts
        collective = Collective(op=op, ranks=layout.ranks, parts=unit, root=root)
        self.composer = Composer(collective, unit)
        self.layout = layout
        self.leaders = layout.leaders(root)
        self.start = 0

    def collect(self, shares: Callable[[int], Iterable[int]]) -> None:
        """Adds transfers of shares from each rank to its leader."""
        for leader, host in zip(self.leaders, self.layout.hosts, strict=True):
            for rank in host:
                self.move(rank, leader, shares(rank))
        self.start = int(self.layout.shared)

    def exchange(self, top: Schedule, bundles: Iterable[Iterable[int]]) -> None:
        """Adds the schedule `top`, which the leaders run among themselves. Each element of
        `bundles` lists the shares that form one piece of `top`.
        """
        pieces = [list(bundle) for bundle in bundles]
        self.start = self.composer.add(top, self.leaders, pieces, start=self.start)

    def distribute(self, shares: Callable[[int], Iterable[int]]) -> None:
        """Adds transfers of shares from each leader to the ranks of its host."""
        self.composer.builder.round = self.start
        for leader, host in zip(self.leaders, self.layout.hosts, strict=True):
            for rank in host:
                self.move(leader, rank, shares(rank), reduce=False)

    def move(self, src: int, dst: int, shares: Iterable[int], *, reduce: bool = True) -> None:
        """Adds transfers between two ranks to the current round, unless the ranks are the same."""
        if src == dst:
            return
        b, unit = self.composer.builder, self.composer.unit
        add = b.reduce if reduce and b.collective.op.reduces else b.copy
        for first, count in runs(shares):
            add(src, first * unit, dst, count=count * unit)

"""More than one ring at a time: both ways round, or two rings without a common link.

Any number of equal rings is `ring:channels=k`. n is the number of ranks, N the bytes of the whole
vector; bytes are those a rank sends.
"""

from __future__ import annotations

from math import gcd

from unisono.algorithms import ring
from unisono.algorithms.compose import backwards, in_channels, in_sequence
from unisono.algorithms.cost import Cost, of_all_gather, there_and_back
from unisono.algorithms.cost import backwards as backwards_cost
from unisono.algorithms.registry import algorithm
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _both_ways_cost(ranks: int) -> Cost:
    return of_all_gather(ranks // 2, ranks - 1, ranks)


def _both_ways_scatter_cost(ranks: int) -> Cost:
    return backwards_cost(_both_ways_cost(ranks), ranks)


def _both_ways_reduce_cost(ranks: int) -> Cost:
    return there_and_back(_both_ways_cost(ranks), ranks)


@algorithm(Op.ALL_GATHER, "bidirectional_ring", cost=_both_ways_cost)
def all_gather(ranks: int) -> Schedule:
    """Each chunk travels both ways at once, half round the ring, and every rank keeps a copy.

    Rounds: floor(n/2). Bytes: (n-1)/n x N. Source: Wang et al., "Overlap communication with
    dependent computation via decomposition in large deep learning models" (2023), bidirectional
    transfers.
    """
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=ranks), "bidirectional_ring")
    for step in range(ranks // 2):
        for rank in range(ranks):
            b.copy(rank, (rank - step) % ranks, (rank + 1) % ranks, channel=0)
            if step < (ranks - 1) // 2:
                b.copy(rank, (rank + step) % ranks, (rank - 1) % ranks, channel=1)
        b.next_round()
    return b.build()


@algorithm(Op.REDUCE_SCATTER, "bidirectional_ring", cost=_both_ways_scatter_cost)
def reduce_scatter(ranks: int) -> Schedule:
    """Sums come to the owner of a chunk from both sides, each from half of the ring.

    Rounds: floor(n/2). Bytes: (n-1)/n x N. Reductions: (n-1)/n x N. Source: Wang et al. (2023),
    turned round.
    """
    return backwards(all_gather(ranks))


@algorithm(Op.ALL_REDUCE, "bidirectional_ring", cost=_both_ways_reduce_cost)
def all_reduce(ranks: int) -> Schedule:
    """Reduce-scatter from both sides, then all-gather to both sides.

    Rounds: 2 floor(n/2). Bytes: 2(n-1)/n x N. Reductions: (n-1)/n x N. Source: Wang et al.
    (2023).
    """
    return in_sequence(Op.ALL_REDUCE, [reduce_scatter(ranks), all_gather(ranks)])


@algorithm(Op.ALL_REDUCE, "double_ring", cost=ring.all_reduce_cost)
def double_ring_all_reduce(ranks: int) -> Schedule:
    """Half of the vector goes round each of two rings that have no link in common.

    Rounds: 2(n-1). Bytes: 2(n-1)/n x N. Reductions: (n-1)/n x N. Source: the rings of NCCL on
    DGX-1, one for each set of links: Jeaugey, "NCCL 2.0" (GTC 2017).
    """
    return in_channels([ring.all_reduce(ranks)] * 2, disjoint_rings(ranks))


@algorithm(Op.REDUCE_SCATTER, "double_ring", cost=ring.reduce_scatter_cost)
def double_ring_reduce_scatter(ranks: int) -> Schedule:
    """Half of each piece goes round each of two rings that have no link in common.

    Rounds: n-1. Bytes: (n-1)/n x N. Reductions: (n-1)/n x N. Source: Jeaugey (2017).
    """
    return in_channels([ring.reduce_scatter(ranks)] * 2, disjoint_rings(ranks))


@algorithm(Op.ALL_GATHER, "double_ring", cost=ring.all_gather_cost)
def double_ring_all_gather(ranks: int) -> Schedule:
    """Half of each piece goes round each of two rings that have no link in common.

    Rounds: n-1. Bytes: (n-1)/n x N. Source: Jeaugey (2017).
    """
    return in_channels([ring.all_gather(ranks)] * 2, disjoint_rings(ranks))


def disjoint_rings(ranks: int) -> tuple[list[int], list[int]]:
    """Two orders of the ranks in which no two are neighbours twice: 0, 1, 2, ... and 0, s, 2s, ...

    With fewer than 5 ranks there are no such rings; then the second is the first backwards, which
    shares no direction of a link.

    >>> disjoint_rings(8)
    ([0, 1, 2, 3, 4, 5, 6, 7], [0, 3, 6, 1, 4, 7, 2, 5])
    """
    first = list(range(ranks))
    if ranks < 5:
        return first, first[::-1]
    if ranks == 6:  # the one larger count without a stride
        return first, [0, 2, 4, 1, 5, 3]
    stride = next(s for s in range(2, ranks) if gcd(s, ranks) == 1)
    return first, [i * stride % ranks for i in range(ranks)]

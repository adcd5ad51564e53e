"""Algorithms with two simultaneous rings: one ring in both directions, or two rings without a
common link.

`ring:channels=k` makes k equal rings. n is the number of ranks, and N is the size of the whole
vector in bytes. In the docstrings below, "Bytes" is the number of bytes that a rank sends.
"""

from __future__ import annotations

from math import gcd

from unisono.algorithms import ring
from unisono.algorithms.cost import Cost, of_all_gather, scatter_then_gather
from unisono.algorithms.cost import backwards as backwards_cost
from unisono.algorithms.registry import algorithm
from unisono.algorithms.schedule_composition import backwards, in_channels, in_sequence
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _both_ways_cost(ranks: int) -> Cost:
    return of_all_gather(ranks // 2, ranks - 1, ranks)


def _both_ways_scatter_cost(ranks: int) -> Cost:
    return backwards_cost(_both_ways_cost(ranks), ranks)


def _both_ways_reduce_cost(ranks: int) -> Cost:
    return scatter_then_gather(_both_ways_cost(ranks), ranks)


@algorithm(Op.ALL_GATHER, "bidirectional_ring", cost=_both_ways_cost)
def all_gather(ranks: int) -> Schedule:
    """Sends each chunk in both directions at the same time, halfway around the ring. Every rank
    keeps a copy.

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
    """Reduces each chunk towards its owner from both directions, along one half of the ring on each
    side.

    Rounds: floor(n/2). Bytes: (n-1)/n x N. Reductions: (n-1)/n x N. Source: Wang et al. (2023),
    reversed.
    """
    return backwards(all_gather(ranks))


@algorithm(Op.ALL_REDUCE, "bidirectional_ring", cost=_both_ways_reduce_cost)
def all_reduce(ranks: int) -> Schedule:
    """Runs a reduce-scatter from both directions, then an all-gather in both directions.

    Rounds: 2 floor(n/2). Bytes: 2(n-1)/n x N. Reductions: (n-1)/n x N. Source: Wang et al. (2023).
    """
    return in_sequence(Op.ALL_REDUCE, [reduce_scatter(ranks), all_gather(ranks)])


@algorithm(Op.ALL_REDUCE, "double_ring", cost=ring.all_reduce_cost)
def double_ring_all_reduce(ranks: int) -> Schedule:
    """Runs an all-reduce on two rings without a common link, each for half of the vector.

    Rounds: 2(n-1). Bytes: 2(n-1)/n x N. Reductions: (n-1)/n x N. Source: the rings of NCCL on
    DGX-1, one for each set of links: Jeaugey, "NCCL 2.0" (GTC 2017).
    """
    return in_channels([ring.all_reduce(ranks)] * 2, disjoint_rings(ranks))


@algorithm(Op.REDUCE_SCATTER, "double_ring", cost=ring.reduce_scatter_cost)
def double_ring_reduce_scatter(ranks: int) -> Schedule:
    """Runs a reduce-scatter on two rings without a common link, each for half of each piece.

    Rounds: n-1. Bytes: (n-1)/n x N. Reductions: (n-1)/n x N. Source: Jeaugey (2017).
    """
    return in_channels([ring.reduce_scatter(ranks)] * 2, disjoint_rings(ranks))


@algorithm(Op.ALL_GATHER, "double_ring", cost=ring.all_gather_cost)
def double_ring_all_gather(ranks: int) -> Schedule:
    """Runs an all-gather on two rings without a common link, each for half of each piece.

    Rounds: n-1. Bytes: (n-1)/n x N. Source: Jeaugey (2017).
    """
    return in_channels([ring.all_gather(ranks)] * 2, disjoint_rings(ranks))


def disjoint_rings(ranks: int) -> tuple[list[int], list[int]]:
    """Returns two rings, as orders of the ranks, that have no pair of neighbours in common: 0, 1,
    2, ... and 0, s, 2s, ...

    Such orders need at least 5 ranks. With fewer ranks, the second order is the reverse of the
    first. Then the two rings use each link in opposite directions.

    >>> disjoint_rings(8)
    ([0, 1, 2, 3, 4, 5, 6, 7], [0, 3, 6, 1, 4, 7, 2, 5])
    """
    first = list(range(ranks))
    if ranks < 5:
        return first, first[::-1]
    if ranks == 6:  # no constant stride gives a second ring without common neighbours
        return first, [0, 2, 4, 1, 5, 3]
    stride = next(s for s in range(2, ranks) if gcd(s, ranks) == 1)
    return first, [i * stride % ranks for i in range(ranks)]

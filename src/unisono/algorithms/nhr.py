"""Binomial trees from all ranks at once, far first: HCCL's nonuniform hierarchical ring.

The first message, across half the ring, is a single piece; the last and largest goes to the
neighbour. Any rank count takes ceil(log2(n)) rounds. n is the number of ranks, N the bytes of the
whole vector; bytes are those a rank sends.
"""

from __future__ import annotations

from unisono.algorithms.compose import backwards, in_sequence, runs
from unisono.algorithms.cost import Cost, of_all_gather, there_and_back
from unisono.algorithms.cost import backwards as backwards_cost
from unisono.algorithms.registry import algorithm
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _gather_cost(ranks: int) -> Cost:
    return of_all_gather((ranks - 1).bit_length(), ranks - 1, ranks)


def _scatter_cost(ranks: int) -> Cost:
    return backwards_cost(_gather_cost(ranks), ranks)


def _all_reduce_cost(ranks: int) -> Cost:
    return there_and_back(_gather_cost(ranks), ranks)


@algorithm(Op.ALL_GATHER, "nhr", cost=_gather_cost)
def all_gather(ranks: int) -> Schedule:
    """At distance d = ..., 4, 2, 1, send up the pieces from 0, 2d, 4d, ... ranks below.

    Rounds: ceil(log2(n)). Bytes: (n-1)/n x N. Source: NHR in Huawei's HCCL (the cann-hccl
    repository, `all_gather_nhr`).
    """
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=ranks), "nhr")
    for bit in reversed(range((ranks - 1).bit_length())):
        distance = 1 << bit
        for rank in range(ranks):
            ways = range(0, ranks - distance, 2 * distance)
            for first, count in runs((rank - way) % ranks for way in ways):
                b.copy(rank, first, (rank + distance) % ranks, count=count)
        b.next_round()
    return b.build()


@algorithm(Op.REDUCE_SCATTER, "nhr", cost=_scatter_cost)
def reduce_scatter(ranks: int) -> Schedule:
    """The all-gather backwards: near first.

    Rounds: ceil(log2(n)). Bytes: (n-1)/n x N. Reductions: (n-1)/n x N. Source: NHR in Huawei's
    HCCL (`reduce_scatter_nhr`).
    """
    return backwards(all_gather(ranks))


@algorithm(Op.ALL_REDUCE, "nhr", cost=_all_reduce_cost)
def all_reduce(ranks: int) -> Schedule:
    """Reduce-scatter near first, all-gather far first.

    Rounds: 2 ceil(log2(n)). Bytes: 2(n-1)/n x N. Reductions: (n-1)/n x N. Source: NHR in Huawei's
    HCCL (`all_reduce_nhr`).
    """
    gather = all_gather(ranks)
    return in_sequence(Op.ALL_REDUCE, [backwards(gather), gather])

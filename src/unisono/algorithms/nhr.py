"""HCCL's nonuniform hierarchical ring (NHR): simultaneous binomial trees from all ranks, with far
distances first.

The first message of an all-gather goes over the longest distance and contains a single piece. The
last and largest message goes to the neighbour. Any number of ranks needs ceil(log2(n)) rounds. n is
the number of ranks, and N is the size of the whole vector in bytes. In the docstrings below,
"Bytes" is the number of bytes that a rank sends.
"""

from __future__ import annotations

from unisono.algorithms.cost import Cost, of_all_gather, scatter_then_gather
from unisono.algorithms.cost import backwards as backwards_cost
from unisono.algorithms.registry import algorithm
from unisono.algorithms.schedule_composition import backwards, in_sequence, runs
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _gather_cost(ranks: int) -> Cost:
    return of_all_gather((ranks - 1).bit_length(), ranks - 1, ranks)


def _scatter_cost(ranks: int) -> Cost:
    return backwards_cost(_gather_cost(ranks), ranks)


def _all_reduce_cost(ranks: int) -> Cost:
    return scatter_then_gather(_gather_cost(ranks), ranks)


@algorithm(Op.ALL_GATHER, "nhr", cost=_gather_cost)
def all_gather(ranks: int) -> Schedule:
    """Sends the pieces of ranks r, r-2d, r-4d, ... from each rank r to rank r+d. The distance d is
    a power of two that halves in each round, down to 1.

    Rounds: ceil(log2(n)). Bytes: (n-1)/n x N. Source: NHR in Huawei's HCCL (the cann-hccl
    repository, `all_gather_nhr`).
    """
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=ranks), "nhr")
    for bit in reversed(range((ranks - 1).bit_length())):
        distance = 1 << bit
        for rank in range(ranks):
            offsets = range(0, ranks - distance, 2 * distance)
            for first, count in runs((rank - offset) % ranks for offset in offsets):
                b.copy(rank, first, (rank + distance) % ranks, count=count)
        b.next_round()
    return b.build()


@algorithm(Op.REDUCE_SCATTER, "nhr", cost=_scatter_cost)
def reduce_scatter(ranks: int) -> Schedule:
    """Runs the transfers of the all-gather in reverse order and direction, with near distances
    first.

    Rounds: ceil(log2(n)). Bytes: (n-1)/n x N. Reductions: (n-1)/n x N. Source: NHR in Huawei's HCCL
    (`reduce_scatter_nhr`).
    """
    return backwards(all_gather(ranks))


@algorithm(Op.ALL_REDUCE, "nhr", cost=_all_reduce_cost)
def all_reduce(ranks: int) -> Schedule:
    """Runs a reduce-scatter with near distances first, then an all-gather with far distances first.

    Rounds: 2 ceil(log2(n)). Bytes: 2(n-1)/n x N. Reductions: (n-1)/n x N. Source: NHR in Huawei's
    HCCL (`all_reduce_nhr`).
    """
    gather = all_gather(ranks)
    return in_sequence(Op.ALL_REDUCE, [backwards(gather), gather])

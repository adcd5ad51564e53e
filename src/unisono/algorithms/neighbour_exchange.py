"""Neighbour exchange: each rank exchanges its latest pieces alternately with its left and its right
neighbour.

The algorithm needs half the rounds of a ring, and ranks send only to neighbours. n is the number of
ranks, and N is the size of the whole vector in bytes. In the docstrings below, "Bytes" is the
number of bytes that the busiest rank sends. For odd n, the last rank first sends its piece to the
previous rank, and finally receives all other pieces from the previous rank.
"""

from __future__ import annotations

from unisono.algorithms.cost import Cost, of_all_gather
from unisono.algorithms.cost import backwards as backwards_cost
from unisono.algorithms.registry import algorithm
from unisono.algorithms.schedule_composition import backwards, runs
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _gather_cost(ranks: int) -> Cost:
    if ranks % 2 == 0:
        return of_all_gather(ranks // 2, ranks - 1, ranks)
    own = 1 if ranks == 3 else 2  # messages in which rank n-2 also sends the piece of rank n-1
    return of_all_gather(ranks // 2 + 2, 2 * ranks - 3 + own, ranks)


def _scatter_cost(ranks: int) -> Cost:
    return backwards_cost(_gather_cost(ranks), ranks)


@algorithm(Op.ALL_GATHER, "neighbour_exchange", cost=_gather_cost)
def all_gather(ranks: int) -> Schedule:
    """Each rank exchanges its own piece with one neighbour, then its two latest pieces with the
    other neighbour, and so on.

    Rounds: n/2; for odd n (n-1)/2 + 2. Bytes: (n-1)/n x N; for odd n (2n-1)/n x N (4/3 x N for 3
    ranks). Source: Chen, Zhang, Zhang, Yuan, "Performance evaluation of allgather algorithms on
    terascale Linux cluster with fast Ethernet" (2005).
    """
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=ranks), "neighbour_exchange")
    members = ranks - ranks % 2
    odd = members < ranks and members > 0
    latest = [[member] for member in range(members)]
    if odd:
        b.copy(ranks - 1, ranks - 1, ranks - 2)
        b.next_round()
        latest[-1].append(ranks - 1)
    for step in range(members // 2):
        direction = 1 if step % 2 == 0 else -1
        partners = [(m + (-direction if m % 2 else direction)) % members for m in range(members)]
        for member, partner in enumerate(partners):
            for first, count in runs(latest[member]):
                b.copy(member, first, partner, count=count)
        b.next_round()
        got = [latest[partner] for partner in partners]
        latest = [a + c for a, c in zip(latest, got, strict=True)] if step == 0 else got
    if odd:
        b.copy(ranks - 2, 0, ranks - 1, count=ranks - 1)
    return b.build()


@algorithm(Op.REDUCE_SCATTER, "neighbour_exchange", cost=_scatter_cost)
def reduce_scatter(ranks: int) -> Schedule:
    """Runs the transfers of the all-gather in reverse order and direction.

    Rounds: n/2; for odd n (n-1)/2 + 2. Bytes: (n-1)/n x N. Reductions: (n-1)/n x N; for odd n
    (2n-1)/n x N (4/3 x N for 3 ranks). Source: Chen, Zhang, Zhang, Yuan (2005), reversed.
    """
    return backwards(all_gather(ranks))

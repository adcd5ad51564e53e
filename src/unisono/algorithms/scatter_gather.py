"""Rooted operations for long messages, which distribute the root's work over all ranks.

n is the number of ranks, and N is the size of the whole vector in bytes. In the docstrings below,
"Bytes" is the number of bytes that a rank sends.
"""

from __future__ import annotations

from fractions import Fraction

from unisono.algorithms.cost import Cost
from unisono.algorithms.registry import algorithm
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _broadcast_cost(ranks: int) -> Cost:
    return Cost(rounds=2, bytes_sent=Fraction(2 * (ranks - 1), ranks))


def _reduce_cost(ranks: int) -> Cost:
    reductions = Fraction(ranks - 1, ranks)
    return Cost(rounds=2, bytes_sent=Fraction(1), reductions=reductions)


@algorithm(Op.BROADCAST, "scatter_all_gather", cost=_broadcast_cost)
def broadcast(ranks: int, root: int) -> Schedule:
    """The root scatters the parts, then every rank sends its part to all other ranks.

    Rounds: 2. Bytes: 2(n-1)/n x N at the root (the scatter, then its own part), (n-2)/n x N at the
    other ranks. Source: Barnett et al., "Interprocessor collective communication library" (1994),
    the scatter-collect broadcast, over a full mesh.
    """
    collective = Collective(op=Op.BROADCAST, ranks=ranks, parts=ranks, root=root)
    b = Builder(collective, "scatter_all_gather")
    for rank in range(ranks):
        if rank != root:
            b.copy(root, rank, rank)
    b.next_round()
    for owner in range(ranks):
        for rank in range(ranks):
            if rank not in (owner, root):
                b.copy(owner, owner, rank)
    return b.build()


@algorithm(Op.REDUCE, "reduce_scatter_gather", cost=_reduce_cost)
def reduce(ranks: int, root: int) -> Schedule:
    """Every rank reduces one part, in rank order, and sends the result to the root.

    Rounds: 2. Bytes: N, and (n-1)/n x N at the root. Reductions: (n-1)/n x N. Source: Rabenseifner,
    "Optimization of collective reduction operations" (2004), each half in one step over a full
    mesh.
    """
    collective = Collective(op=Op.REDUCE, ranks=ranks, parts=ranks, root=root)
    b = Builder(collective, "reduce_scatter_gather")
    for owner in range(ranks):
        for rank in range(ranks):
            if rank != owner:
                b.reduce(rank, owner, owner)
    b.next_round()
    for owner in range(ranks):
        if owner != root:
            b.copy(owner, owner, root)
    return b.build()

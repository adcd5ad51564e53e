"""Ring algorithms: n-1 rounds between neighbours, with the fewest bytes on links that form a ring.

n is the number of ranks, and N is the size of the whole vector in bytes. In the docstrings below,
"Bytes" is the number of bytes that a rank sends.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from unisono.algorithms.cost import Cost, backwards, of_all_gather, scatter_then_gather
from unisono.algorithms.registry import algorithm
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def all_gather_cost(ranks: int) -> Cost:
    """Returns the cost of `all_gather`: each rank sends one piece per round."""
    return of_all_gather(ranks - 1, ranks - 1, ranks)


def reduce_scatter_cost(ranks: int) -> Cost:
    """Returns the cost of `reduce_scatter`: each rank sends and reduces one piece per round."""
    return backwards(all_gather_cost(ranks), ranks)


def all_reduce_cost(ranks: int) -> Cost:
    """Returns the cost of `all_reduce`: the reduce-scatter plus the all-gather."""
    return scatter_then_gather(all_gather_cost(ranks), ranks)


def _chain_cost(ranks: int) -> Cost:
    return Cost(rounds=2 * (ranks - 1) + ranks - 2, bytes_sent=Fraction(1))


@algorithm(Op.ALL_REDUCE, "ring", cost=all_reduce_cost)
def all_reduce(ranks: int) -> Schedule:
    """Runs a reduce-scatter around the ring, then an all-gather around the ring.

    Rounds: 2(n-1). Bytes: 2(n-1)/n x N. Reductions: (n-1)/n x N. Source: Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
    """
    b = Builder(Collective(op=Op.ALL_REDUCE, ranks=ranks, parts=ranks), "ring")
    _reduce_around(b)
    _gather_around(b)
    return b.build()


@algorithm(Op.REDUCE_SCATTER, "ring", cost=reduce_scatter_cost)
def reduce_scatter(ranks: int) -> Schedule:
    """Each chunk travels once around the ring, collects every contribution, and ends at its owner.

    Rounds: n-1. Bytes: (n-1)/n x N. Reductions: (n-1)/n x N. Source: Patarasuk and Yuan (2009).
    """
    b = Builder(Collective(op=Op.REDUCE_SCATTER, ranks=ranks), "ring")
    _reduce_around(b)
    return b.build()


@algorithm(Op.ALL_GATHER, "ring", cost=all_gather_cost)
def all_gather(ranks: int) -> Schedule:
    """Each chunk travels once around the ring, and every rank keeps a copy.

    Rounds: n-1. Bytes: (n-1)/n x N. Source: Thakur, Rabenseifner, Gropp, "Optimization of
    collective communication operations in MPICH" (2005).
    """
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=ranks), "ring")
    _gather_around(b)
    return b.build()


@algorithm(Op.BROADCAST, "chain", cost=_chain_cost)
def broadcast(ranks: int, root: int) -> Schedule:
    """Sends the vector along the chain root, root+1, ..., with its parts in a pipeline.

    Parts: p = 2(n-1). Rounds: p+n-2. Bytes: N, none at the last rank. Source: the pipeline of
    Pjesivac-Grbovic et al., "Performance analysis of MPI collective operations" (2007).
    """
    parts = max(1, 2 * (ranks - 1))
    b = Builder(Collective(op=Op.BROADCAST, ranks=ranks, parts=parts, root=root), "chain")
    hop = np.arange(ranks - 1)
    for number in range(parts + ranks - 2):
        part = number - hop  # the part that each hop transfers in this round
        busy = hop[(part >= 0) & (part < parts)]
        b.copy((root + busy) % ranks, number - busy, (root + busy + 1) % ranks)
        b.next_round()
    return b.build()


def _reduce_around(b: Builder) -> None:
    """Moves and reduces chunk i around the ring from rank i+1 to rank i, in n-1 rounds."""
    ranks = b.collective.ranks
    rank = np.arange(ranks)
    for step in range(1, ranks):
        b.reduce(rank, (rank - step) % ranks, (rank + 1) % ranks)
        b.next_round()


def _gather_around(b: Builder) -> None:
    """Copies chunk i around the ring from rank i to rank i-1, in n-1 rounds."""
    ranks = b.collective.ranks
    rank = np.arange(ranks)
    for step in range(ranks - 1):
        b.copy(rank, (rank - step) % ranks, (rank + 1) % ranks)
        b.next_round()

"""Pairwise exchange: in round k, every rank r sends one message to rank r + k (modulo n).

n is the number of ranks, N the size of all pieces of a rank in bytes. In the docstrings below,
"Bytes" is the number of bytes that a rank sends.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from unisono.algorithms.cost import Cost, of_all_gather
from unisono.algorithms.cost import backwards as backwards_cost
from unisono.algorithms.registry import algorithm
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _gather_cost(ranks: int) -> Cost:
    return of_all_gather(ranks - 1, ranks - 1, ranks)


def _scatter_cost(ranks: int) -> Cost:
    return backwards_cost(_gather_cost(ranks), ranks)


def _all_to_all_cost(ranks: int) -> Cost:
    return Cost(rounds=ranks - 1, bytes_sent=Fraction(ranks - 1, ranks))


@algorithm(Op.REDUCE_SCATTER, "pairwise", cost=_scatter_cost)
def reduce_scatter(ranks: int) -> Schedule:
    """Each rank reduces one contribution per round into its own piece.

    Rounds: n-1. Bytes: (n-1)/n x N. Reductions: (n-1)/n x N. Source: Thakur, Rabenseifner, Gropp,
    "Optimization of collective communication operations in MPICH" (2005).
    """
    b = Builder(Collective(op=Op.REDUCE_SCATTER, ranks=ranks), "pairwise")
    rank = np.arange(ranks)
    for step in range(1, ranks):
        dest = (rank + step) % ranks
        b.reduce(rank, dest, dest)
        b.next_round()
    return b.build()


@algorithm(Op.ALL_GATHER, "pairwise", cost=_gather_cost)
def all_gather(ranks: int) -> Schedule:
    """Each rank sends its own piece to one rank per round.

    Rounds: n-1. Bytes: (n-1)/n x N. Source: the reduce-scatter of Thakur, Rabenseifner, Gropp
    (2005), reversed.
    """
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=ranks), "pairwise")
    rank = np.arange(ranks)
    for step in range(1, ranks):
        b.copy(rank, rank, (rank + step) % ranks)
        b.next_round()
    return b.build()


@algorithm(Op.ALL_TO_ALL, "pairwise", cost=_all_to_all_cost)
def all_to_all(ranks: int) -> Schedule:
    """Each rank sends one piece and receives one piece per round.

    Rounds: n-1. Bytes: (n-1)/n x N. Source: Thakur, Rabenseifner, Gropp (2005).
    """
    b = Builder(Collective(op=Op.ALL_TO_ALL, ranks=ranks), "pairwise")
    src = np.arange(ranks)
    for step in range(1, ranks):
        dst = (src + step) % ranks
        b.copy(src, src * ranks + dst, dst)
        b.next_round()
    return b.build()

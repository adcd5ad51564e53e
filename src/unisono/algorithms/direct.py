"""Direct exchange: every rank sends its data straight to the ranks that need them, in at most two
rounds.

On one host, where all data move through the same memory, direct exchange is the fastest choice for
long messages. n is the number of ranks. N is the size of the whole vector in bytes (of all pieces
together, if the operation has pieces). In the docstrings below, "Bytes" is the number of bytes that
a rank sends, counted once per receiver.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.algorithms.cost import FREE, Cost, backwards, of_all_gather, scatter_then_gather
from unisono.algorithms.registry import algorithm
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _gather_cost(ranks: int) -> Cost:
    return of_all_gather(1, ranks - 1, ranks)


def _broadcast_cost(ranks: int) -> Cost:
    return Cost(rounds=1, bytes_sent=Fraction(ranks - 1))


def _reduce_cost(ranks: int) -> Cost:
    return Cost(rounds=1, bytes_sent=Fraction(1), reductions=Fraction(ranks - 1))


def _to_root_cost(ranks: int) -> Cost:
    return Cost(rounds=1, bytes_sent=Fraction(1, ranks))


@algorithm(
    Op.ALL_REDUCE, "direct", cost=lambda ranks: scatter_then_gather(_gather_cost(ranks), ranks)
)
def all_reduce(ranks: int) -> Schedule:
    """Each rank i reduces part i of the vector, then sends the result to all ranks.

    Every result is a single reduction of n operands in rank order.

    Rounds: 2. Bytes: 2(n-1)/n x N. Reductions: (n-1)/n x N. Source: Rabenseifner, "Optimization of
    collective reduction operations" (2004), with each half done in one step over a full mesh.
    """
    b = Builder(Collective(op=Op.ALL_REDUCE, ranks=ranks, parts=ranks), "direct")
    owner, rank = _pairs(ranks)
    b.reduce(rank, owner, owner)
    b.next_round()
    b.copy(owner, owner, rank)
    return b.build()


@algorithm(Op.REDUCE_SCATTER, "direct", cost=lambda ranks: backwards(_gather_cost(ranks), ranks))
def reduce_scatter(ranks: int) -> Schedule:
    """Every rank sends piece i directly to rank i, which reduces the pieces in rank order.

    Rounds: 1. Bytes: (n-1)/n x N. Reductions: (n-1)/n x N. Source: Thakur, Rabenseifner, Gropp,
    "Optimization of collective communication operations in MPICH" (2005), in one step.
    """
    b = Builder(Collective(op=Op.REDUCE_SCATTER, ranks=ranks), "direct")
    dest, rank = _pairs(ranks)
    b.reduce(rank, dest, dest)
    return b.build()


@algorithm(Op.ALL_GATHER, "direct", cost=_gather_cost)
def all_gather(ranks: int) -> Schedule:
    """Every rank sends its piece to all other ranks.

    Rounds: 1. Bytes: (n-1)/n x N. Source: Thakur, Rabenseifner, Gropp (2005), in one step.
    """
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=ranks), "direct")
    owner, rank = _pairs(ranks)
    b.copy(owner, owner, rank)
    return b.build()


@algorithm(Op.ALL_TO_ALL, "direct", cost=_gather_cost)
def all_to_all(ranks: int) -> Schedule:
    """Every rank sends its piece for rank i to rank i, all in one round.

    Rounds: 1. Bytes: (n-1)/n x N. Source: Thakur, Rabenseifner, Gropp (2005), the isend-irecv
    algorithm.
    """
    b = Builder(Collective(op=Op.ALL_TO_ALL, ranks=ranks), "direct")
    src, dst = _pairs(ranks)
    b.copy(src, src * ranks + dst, dst)
    return b.build()


@algorithm(Op.BROADCAST, "direct", cost=_broadcast_cost)
def broadcast(ranks: int, root: int) -> Schedule:
    """The root sends the whole vector to every other rank.

    Rounds: 1. Bytes: (n-1) x N at the root. Source: the flat tree of Pjesivac-Grbovic et al.,
    "Performance analysis of MPI collective operations" (2007).
    """
    b = Builder(Collective(op=Op.BROADCAST, ranks=ranks, root=root), "direct")
    rank = np.delete(np.arange(ranks), root)
    b.copy(root, 0, rank)
    return b.build()


@algorithm(Op.REDUCE, "direct", cost=_reduce_cost)
def reduce(ranks: int, root: int) -> Schedule:
    """Every rank sends its whole vector to the root, which reduces the vectors in rank order.

    Rounds: 1. Bytes: N. Reductions: (n-1) x N at the root. Source: Pjesivac-Grbovic et al. (2007).
    """
    b = Builder(Collective(op=Op.REDUCE, ranks=ranks, root=root), "direct")
    rank = np.delete(np.arange(ranks), root)
    b.reduce(rank, 0, root)
    return b.build()


@algorithm(Op.GATHER, "direct", cost=_to_root_cost)
def gather(ranks: int, root: int) -> Schedule:
    """Every rank sends its piece to the root.

    Rounds: 1. Bytes: N/n, received (n-1)/n x N at the root. Source: Pjesivac-Grbovic et al. (2007).
    """
    b = Builder(Collective(op=Op.GATHER, ranks=ranks, root=root), "direct")
    rank = np.delete(np.arange(ranks), root)
    b.copy(rank, rank, root)
    return b.build()


@algorithm(Op.SCATTER, "direct", cost=_gather_cost)
def scatter(ranks: int, root: int) -> Schedule:
    """The root sends each rank its piece.

    Rounds: 1. Bytes: (n-1)/n x N at the root. Source: Pjesivac-Grbovic et al. (2007).
    """
    b = Builder(Collective(op=Op.SCATTER, ranks=ranks, root=root), "direct")
    rank = np.delete(np.arange(ranks), root)
    b.copy(root, rank, rank)
    return b.build()


@algorithm(Op.BARRIER, "direct", cost=lambda ranks: FREE)
def barrier(ranks: int) -> Schedule:
    """Moves no data. The executor itself waits until all ranks have arrived.

    Rounds: 0. Bytes: 0.
    """
    return Builder(Collective(op=Op.BARRIER, ranks=ranks), "direct").build()


def _pairs(ranks: int) -> tuple[NDArray[Any], ...]:
    """Returns all pairs of different ranks as two arrays, ordered by the first rank."""
    return np.nonzero(~np.eye(ranks, dtype=bool))

"""Chain algorithms: each rank forwards data to the next rank, while further parts or pieces follow
in a pipeline.

The chain consists of the ranks root, root+1, and so on. The broadcast along a chain is
`ring.broadcast`. n is the number of ranks, and p = 2(n-1) is the number of parts. N is the size of
the whole vector in bytes. In the docstrings below, "Bytes" is the number of bytes that the busiest
rank sends.
"""

from __future__ import annotations

from fractions import Fraction

from unisono.algorithms import ring
from unisono.algorithms.cost import Cost
from unisono.algorithms.registry import algorithm
from unisono.algorithms.schedule_composition import backwards
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _reduce_cost(ranks: int) -> Cost:
    rounds = 2 * (ranks - 1) + ranks - 2
    return Cost(rounds=rounds, bytes_sent=Fraction(1), reductions=Fraction(1))


def _all_reduce_cost(ranks: int) -> Cost:
    rounds = 2 * (ranks - 1) + 2 * ranks - 3
    sent = Fraction(2 if ranks > 2 else 1)
    return Cost(rounds=rounds, bytes_sent=sent, reductions=Fraction(1))


def _scatter_cost(ranks: int) -> Cost:
    return Cost(rounds=ranks - 1, bytes_sent=Fraction(ranks - 1, ranks))


@algorithm(Op.REDUCE, "chain", cost=_reduce_cost)
def reduce(ranks: int, root: int) -> Schedule:
    """Sends partial sums along the chain to the root. Runs the transfers of the broadcast in
    reverse order and direction.

    Rounds: p+n-2. Bytes: N. Reductions: N. Source: the pipeline of Pjesivac-Grbovic et al.,
    "Performance analysis of MPI collective operations" (2007).
    """
    return backwards(ring.broadcast(ranks, root))


@algorithm(Op.ALL_REDUCE, "chain", cost=_all_reduce_cost)
def all_reduce(ranks: int) -> Schedule:
    """Reduces each part of the vector along the chain to rank 0, then immediately sends the result
    back along the chain.

    Rounds: p+2n-3. Bytes: 2N, for 2 ranks N. Reductions: N. Source: the pipelines of
    Pjesivac-Grbovic et al. (2007), one directly after the other.
    """
    parts = max(1, 2 * (ranks - 1))
    b = Builder(Collective(op=Op.ALL_REDUCE, ranks=ranks, parts=parts), "chain")
    for part in range(parts if ranks > 1 else 0):
        b.round = part
        for rank in range(ranks - 1, 0, -1):
            b.reduce(rank, part, rank - 1)
            b.next_round()
        for rank in range(ranks - 1):
            b.copy(rank, part, rank + 1)
            b.next_round()
    return b.build()


@algorithm(Op.SCATTER, "chain", cost=_scatter_cost)
def scatter(ranks: int, root: int) -> Schedule:
    """Sends each rank's piece along the chain from the root, starting with the piece of the last
    rank. All pieces must have the same length.

    Rounds: n-1. Bytes: (n-1)/n x N at the root. Source: Pjesivac-Grbovic et al. (2007), the
    pipeline, with pieces instead of parts.
    """
    b = Builder(Collective(op=Op.SCATTER, ranks=ranks, root=root), "chain")
    for distance in range(1, ranks):
        b.round = ranks - 1 - distance
        for hop in range(distance):
            b.copy((root + hop) % ranks, (root + distance) % ranks, (root + hop + 1) % ranks)
            b.next_round()
    return b.build()


@algorithm(Op.GATHER, "chain", cost=_scatter_cost)
def gather(ranks: int, root: int) -> Schedule:
    """Sends each rank's piece along the chain to the root. All pieces must have the same length.

    Rounds: n-1. Bytes: (n-1)/n x N, by the root's neighbour. Source: Pjesivac-Grbovic et al.
    (2007), the pipeline, with pieces instead of parts.
    """
    return backwards(scatter(ranks, root))

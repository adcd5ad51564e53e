"""In round k every rank sends to the rank k above it: one message in and one out at a time.

n is the number of ranks, N the bytes of all pieces of a rank; bytes are those a rank sends.
"""

from __future__ import annotations

from unisono.algorithms.registry import algorithm
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


@algorithm(Op.REDUCE_SCATTER, "pairwise")
def reduce_scatter(ranks: int) -> Schedule:
    """Each rank adds one contribution per round to the piece it owns.

    Rounds: n-1. Bytes: (n-1)/n x N. Source: Thakur, Rabenseifner, Gropp, "Optimization of
    collective communication operations in MPICH" (2005), section 4.3.
    """
    b = Builder(Collective(op=Op.REDUCE_SCATTER, ranks=ranks), "pairwise")
    for step in range(1, ranks):
        for rank in range(ranks):
            dest = (rank + step) % ranks
            b.reduce(rank, dest, dest)
        b.next_round()
    return b.build()


@algorithm(Op.ALL_TO_ALL, "pairwise")
def all_to_all(ranks: int) -> Schedule:
    """Each rank sends one piece and receives one per round.

    Rounds: n-1. Bytes: (n-1)/n x N. Source: Thakur, Rabenseifner, Gropp (2005), section 4.4.
    """
    b = Builder(Collective(op=Op.ALL_TO_ALL, ranks=ranks), "pairwise")
    for step in range(1, ranks):
        for src in range(ranks):
            dst = (src + step) % ranks
            b.copy(src, src * ranks + dst, dst)
        b.next_round()
    return b.build()

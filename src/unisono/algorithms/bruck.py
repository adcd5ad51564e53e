"""Bruck's algorithms, which need ceil(log_k(n)) rounds for any number of ranks.

n is the number of ranks and k is the radix. N is the size of the whole vector in bytes (all pieces
of a rank). In the docstrings below, "Bytes" is the number of bytes that a rank sends. In each
round, a rank sends to up to k-1 other ranks. A larger radix therefore needs fewer rounds.
"""

from __future__ import annotations

from fractions import Fraction

from unisono.algorithms.cost import Cost, of_all_gather
from unisono.algorithms.cost import backwards as backwards_cost
from unisono.algorithms.grid import powers
from unisono.algorithms.registry import algorithm
from unisono.algorithms.schedule_composition import backwards, runs
from unisono.errors import UnsupportedError
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _gather_cost(ranks: int, *, radix: int = 2) -> Cost:
    return of_all_gather(len(_weights(ranks, radix)), ranks - 1, ranks)


def _scatter_cost(ranks: int, *, radix: int = 2) -> Cost:
    return backwards_cost(_gather_cost(ranks, radix=radix), ranks)


def _all_to_all_cost(ranks: int, *, radix: int = 2) -> Cost:
    weights = _weights(ranks, radix)
    moved = sum(1 for weight in weights for distance in range(ranks) if distance // weight % radix)
    return Cost(rounds=len(weights), bytes_sent=Fraction(moved, ranks))


@algorithm(Op.ALL_GATHER, "bruck", cost=_gather_cost)
def all_gather(ranks: int, *, radix: int = 2) -> Schedule:
    """Each rank sends all its pieces to k-1 other ranks per round, so that the number of pieces
    grows k-fold. With w pieces, rank r sends to ranks r-w, r-2w, ..., modulo n.

    Rounds: ceil(log_k(n)). Bytes: (n-1)/n x N. Source: Bruck et al., "Efficient algorithms for
    all-to-all communications in multiport message-passing systems" (1997), the concatenation.
    """
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=ranks), "bruck")
    for weight in _weights(ranks, radix):
        for distance in range(weight, min(weight * radix, ranks), weight):
            for rank in range(ranks):
                own = [(rank + i) % ranks for i in range(min(weight, ranks - distance))]
                for first, count in runs(own):
                    b.copy(rank, first, (rank - distance) % ranks, count=count)
        b.next_round()
    return b.build()


@algorithm(Op.REDUCE_SCATTER, "bruck", cost=_scatter_cost)
def reduce_scatter(ranks: int, *, radix: int = 2) -> Schedule:
    """Runs the transfers of the all-gather in reverse order and direction.

    Rounds: ceil(log_k(n)). Bytes: (n-1)/n x N. Reductions: (n-1)/n x N. Source: Träff, "Optimal,
    non-pipelined reduce-scatter and allreduce algorithms" (2024), a circulant graph by doubling.
    """
    return backwards(all_gather(ranks, radix=radix))


@algorithm(Op.ALL_TO_ALL, "bruck", cost=_all_to_all_cost)
def all_to_all(ranks: int, *, radix: int = 2) -> Schedule:
    """Writes each piece's distance from source to destination in base k. Round i moves each piece
    by the value of digit i, which is the digit times k^i.

    Rounds: ceil(log_k(n)). Bytes: the number of nonzero digits of 0..n-1 in base k, divided by n, x
    N; for powers of two log2(n)/2 x N. Source: Bruck et al. (1997), the index operation.
    """
    b = Builder(Collective(op=Op.ALL_TO_ALL, ranks=ranks), "bruck")
    for weight in _weights(ranks, radix):
        for distance in range(1, ranks):
            digit = distance // weight % radix
            travelled = distance % weight
            for src in range(ranks if digit else 0):
                here = (src + travelled) % ranks
                b.copy(
                    here, src * ranks + (src + distance) % ranks, (here + digit * weight) % ranks
                )
        b.next_round()
    return b.build()


def _weights(ranks: int, radix: int) -> list[int]:
    if radix < 2:
        raise UnsupportedError(f"bruck: expected a radix of at least 2, got {radix}")
    return powers(radix, ranks)

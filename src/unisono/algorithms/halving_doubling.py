"""Recursive halving and doubling: the amount of data and the distance between partners halve in
each round, then double again.

The algorithm sends as few bytes as a ring, in about 2 log2(n) rounds. n is the number of ranks. m
is the largest power of two that is at most n. e = n - m is the number of extra ranks (see
`power_of_two_ranks`). N is the size of the whole vector in bytes. In the docstrings below, "Bytes"
is the number of bytes that the busiest rank sends.
"""

from __future__ import annotations

from unisono.algorithms import power_of_two_ranks
from unisono.algorithms.cost import Cost, scatter_then_gather
from unisono.algorithms.cost import backwards as backwards_cost
from unisono.algorithms.registry import algorithm
from unisono.algorithms.schedule_composition import backwards, in_sequence
from unisono.schedule import Schedule
from unisono.types import Op


def _reduce_scatter_cost(ranks: int) -> Cost:
    return backwards_cost(power_of_two_ranks.all_gather_cost(ranks), ranks)


def _all_reduce_cost(ranks: int) -> Cost:
    def of_members(members: int) -> Cost:
        return scatter_then_gather(power_of_two_ranks.all_gather_cost(members), members)

    return power_of_two_ranks.all_reduce_cost(ranks, of_members)


@algorithm(Op.REDUCE_SCATTER, "recursive_halving", cost=_reduce_scatter_cost)
def reduce_scatter(ranks: int) -> Schedule:
    """In each round, partners exchange half of their remaining data, first at distance n/2, finally
    at distance 1.

    Rounds: log2(m), and 2 more if e > 0. Bytes: (n-1)/n x N. Reductions: (n-1)/n x N for powers of
    two, else (m-1 + n-1 + sum of min(2^k, e) over k < log2(m))/n x N. Source: Thakur, Rabenseifner,
    Gropp, "Optimization of collective communication operations in MPICH" (2005).
    """
    return backwards(power_of_two_ranks.all_gather(ranks, power_of_two_ranks.hypercube_partners))


@algorithm(Op.ALL_REDUCE, "halving_doubling", cost=_all_reduce_cost)
def all_reduce(ranks: int) -> Schedule:
    """Runs a reduce-scatter by recursive halving, then an all-gather by recursive doubling.

    Rounds: 2 log2(m), and 2 more if e > 0. Bytes: 2(m-1)/m x N, and N more if e > 0. Reductions:
    (m-1)/m x N, and N more if e > 0. Source: Rabenseifner, "Optimization of collective reduction
    operations" (2004); the extra ranks as in Thakur et al. (2005).
    """

    def of_members(members: int) -> Schedule:
        gather = power_of_two_ranks.all_gather(members, power_of_two_ranks.hypercube_partners)
        return in_sequence(Op.ALL_REDUCE, [backwards(gather), gather])

    return power_of_two_ranks.all_reduce(ranks, of_members)

"""Recursive doubling: exchanges at doubling distances, in about log2(n) rounds, for short messages.

n is the number of ranks. m is the largest power of two that is at most n. e = n - m is the number
of extra ranks (see `power_of_two_ranks`). N is the size of the whole vector in bytes. In the
docstrings below, "Bytes" is the number of bytes that the busiest rank sends.
"""

from __future__ import annotations

from fractions import Fraction

from unisono.algorithms import power_of_two_ranks
from unisono.algorithms.cost import Cost
from unisono.algorithms.registry import algorithm
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _all_reduce_cost(ranks: int) -> Cost:
    def of_members(members: int) -> Cost:
        steps = members.bit_length() - 1
        return Cost(rounds=steps, bytes_sent=Fraction(steps), reductions=Fraction(steps))

    return power_of_two_ranks.all_reduce_cost(ranks, of_members)


@algorithm(Op.ALL_REDUCE, "recursive_doubling", cost=_all_reduce_cost)
def all_reduce(ranks: int) -> Schedule:
    """Each rank exchanges its partial sum with the partner at distance 2^k in round k.

    Rounds: log2(m), and 2 more if e > 0. Bytes: log2(m) x N, and N more if e > 0. Reductions: the
    same. Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations
    in MPICH" (2005).
    """

    def of_members(members: int) -> Schedule:
        b = Builder(Collective(op=Op.ALL_REDUCE, ranks=members), "recursive_doubling")
        for partners in power_of_two_ranks.hypercube_partners(members):
            for member, partner in enumerate(partners):
                b.reduce(member, 0, partner)
            b.next_round()
        return b.build()

    return power_of_two_ranks.all_reduce(ranks, of_members)


@algorithm(Op.ALL_GATHER, "recursive_doubling", cost=power_of_two_ranks.all_gather_cost)
def all_gather(ranks: int) -> Schedule:
    """Each rank exchanges all its pieces with the partner at distance 2^k in round k.

    Rounds: log2(m), and 2 more if e > 0. Bytes: (n-1)/n x N for powers of two, else (m-1 + n-1 +
    sum of min(2^k, e) over k < log2(m))/n x N. Source: Thakur, Rabenseifner, Gropp (2005).
    """
    return power_of_two_ranks.all_gather(ranks, power_of_two_ranks.hypercube_partners)

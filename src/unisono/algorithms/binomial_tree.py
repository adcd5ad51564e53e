"""Binomial trees, which are k-nomial trees with k = 2.

In a broadcast, the number of ranks below a child halves in each round.

n is the number of ranks, and N is the size of the whole vector in bytes. In the docstrings below,
"Bytes" is the number of bytes that the busiest rank sends.
"""

from __future__ import annotations

from functools import partial

from unisono.algorithms import k_nomial
from unisono.algorithms.registry import algorithm
from unisono.schedule import Schedule
from unisono.types import Op


@algorithm(Op.BROADCAST, "binomial_tree", cost=partial(k_nomial.broadcast_cost, k=2))
def broadcast(ranks: int, root: int) -> Schedule:
    """The root sends to the rank at distance n/2. Both ranks then send to ranks at distance n/4,
    and so on.

    Rounds: ceil(log2(n)). Bytes: ceil(log2(n)) x N, at the root. Source: Thakur, Rabenseifner,
    Gropp, "Optimization of collective communication operations in MPICH" (2005).
    """
    return k_nomial.broadcast(ranks, root, k=2)


@algorithm(Op.REDUCE, "binomial_tree", cost=partial(k_nomial.reduce_cost, k=2))
def reduce(ranks: int, root: int) -> Schedule:
    """Sends partial sums from children to their parents, along the same tree as a broadcast from
    the root.

    Rounds: ceil(log2(n)). Bytes: N. Reductions: ceil(log2(n)) x N, at the root. Source: Thakur,
    Rabenseifner, Gropp (2005).
    """
    return k_nomial.reduce(ranks, root, k=2)


@algorithm(Op.GATHER, "binomial_tree", cost=partial(k_nomial.gather_cost, k=2))
def gather(ranks: int, root: int) -> Schedule:
    """Each rank sends the pieces of all ranks in its subtree to its parent. All pieces must have
    the same length.

    Rounds: ceil(log2(n)). Bytes: up to N/2, by a child of the root. Source: Chan, Heimlich,
    Purkayastha, van de Geijn, "Collective communication: theory, practice, and experience" (2007),
    the minimum-spanning-tree gather.
    """
    return k_nomial.gather(ranks, root, k=2)


@algorithm(Op.SCATTER, "binomial_tree", cost=partial(k_nomial.scatter_cost, k=2))
def scatter(ranks: int, root: int) -> Schedule:
    """Each rank sends to each child the pieces for all ranks in the child's subtree. All pieces
    must have the same length.

    Rounds: ceil(log2(n)). Bytes: (n-1)/n x N at the root. Source: Chan et al. (2007), the
    minimum-spanning-tree scatter.
    """
    return k_nomial.scatter(ranks, root, k=2)

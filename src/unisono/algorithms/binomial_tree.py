"""A tree in which the subtree below a child halves each round: log2(n) rounds.

Ranks are renumbered from the root. In the round of bit d, every rank that is a multiple of 2d
deals with the rank d above it, which stands for the d ranks from itself on.
n is the number of ranks, N the bytes of the whole vector; bytes are those a rank sends.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.algorithms.registry import rooted_algorithm
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


@rooted_algorithm(Op.BROADCAST, "binomial_tree")
def broadcast(ranks: int, root: int) -> Schedule:
    """The root sends to n/2 away, both send to n/4 away, and so on.

    Rounds: ceil(log2(n)). Bytes: up to log2(n) x N, at the root. Source: Thakur, Rabenseifner,
    Gropp, "Optimization of collective communication operations in MPICH" (2005), section 4.2.
    """
    b = Builder(Collective(op=Op.BROADCAST, ranks=ranks, root=root), "binomial_tree")
    for distance in reversed(_distances(ranks)):
        for parent, child in _edges(ranks, distance):
            b.copy((parent + root) % ranks, 0, (child + root) % ranks)
        b.next_round()
    return b.build()


@rooted_algorithm(Op.REDUCE, "binomial_tree")
def reduce(ranks: int, root: int) -> Schedule:
    """The broadcast tree backwards: children send partial sums to their parents.

    Rounds: ceil(log2(n)). Bytes: N. Source: Thakur, Rabenseifner, Gropp (2005), section 4.4.
    """
    b = Builder(Collective(op=Op.REDUCE, ranks=ranks, root=root), "binomial_tree")
    for distance in _distances(ranks):
        for parent, child in _edges(ranks, distance):
            b.reduce((child + root) % ranks, 0, (parent + root) % ranks)
        b.next_round()
    return b.build()


@rooted_algorithm(Op.GATHER, "binomial_tree")
def gather(ranks: int, root: int) -> Schedule:
    """Each rank sends its parent the pieces of its whole subtree. Pieces must have one length.

    Rounds: ceil(log2(n)). Bytes: up to N/2, by the root's first child. Source: Chan, Heimlich,
    Purkayastha, van de Geijn, "Collective communication: theory, practice, and experience"
    (2007), section 3, the minimum-spanning-tree gather.
    """
    b = Builder(Collective(op=Op.GATHER, ranks=ranks, root=root), "binomial_tree")
    for distance in _distances(ranks):
        for parent, child in _edges(ranks, distance):
            for first, count in _subtree(ranks, root, child, distance):
                b.copy((child + root) % ranks, first, (parent + root) % ranks, count=count)
        b.next_round()
    return b.build()


@rooted_algorithm(Op.SCATTER, "binomial_tree")
def scatter(ranks: int, root: int) -> Schedule:
    """Each rank sends its child the pieces of the child's subtree. Pieces must have one length.

    Rounds: ceil(log2(n)). Bytes: (n-1)/n x N at the root. Source: Chan et al. (2007), section 3,
    the minimum-spanning-tree scatter.
    """
    b = Builder(Collective(op=Op.SCATTER, ranks=ranks, root=root), "binomial_tree")
    for distance in reversed(_distances(ranks)):
        for parent, child in _edges(ranks, distance):
            for first, count in _subtree(ranks, root, child, distance):
                b.copy((parent + root) % ranks, first, (child + root) % ranks, count=count)
        b.next_round()
    return b.build()


def _distances(ranks: int) -> list[int]:
    """1, 2, 4, ... below the rank count."""
    return [1 << k for k in range((ranks - 1).bit_length())]


def _edges(ranks: int, distance: int) -> Iterator[tuple[int, int]]:
    """(parent, child), counted from the root, at one distance."""
    for parent in range(0, ranks - distance, 2 * distance):
        yield parent, parent + distance


def _subtree(ranks: int, root: int, child: int, distance: int) -> Iterator[tuple[int, int]]:
    """The pieces of a child's subtree as (first chunk, count); two ranges if they wrap."""
    count = min(distance, ranks - child)
    first = (child + root) % ranks
    head = min(count, ranks - first)
    yield first, head
    if head < count:
        yield 0, count - head

"""K-nomial trees, which need ceil(log_k(n)) rounds.

In a broadcast, the subtree below a child becomes k times smaller in each round.

Ranks are renumbered from the root. In the round of weight w = k^i, every multiple of k w is a
parent. Its children are the ranks that are w, 2w, ..., (k-1)w higher. The subtree of a child has w
ranks, starting with the child. n is the number of ranks, and N is the size of the whole vector in
bytes. In the docstrings below, "Bytes" is the number of bytes that the busiest rank sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from unisono.algorithms.cost import Cost
from unisono.algorithms.grid import powers
from unisono.algorithms.registry import algorithm
from unisono.algorithms.schedule_composition import backwards
from unisono.errors import UnsupportedError
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def broadcast_cost(ranks: int, *, k: int = 4) -> Cost:
    """Returns the cost of `broadcast`: the root sends the vector to each of its children."""
    return Cost(rounds=len(_weights(ranks, k)), bytes_sent=Fraction(_children(ranks, k)))


def reduce_cost(ranks: int, *, k: int = 4) -> Cost:
    """Returns the cost of `reduce`: the root reduces one vector from each of its children."""
    return Cost(
        rounds=len(_weights(ranks, k)),
        bytes_sent=Fraction(1),
        reductions=Fraction(_children(ranks, k)),
    )


def scatter_cost(ranks: int, *, k: int = 4) -> Cost:
    """Returns the cost of `scatter`: the root sends all pieces except its own piece."""
    return Cost(rounds=len(_weights(ranks, k)), bytes_sent=Fraction(ranks - 1, ranks))


def gather_cost(ranks: int, *, k: int = 4) -> Cost:
    """Returns the cost of `gather`: a child of the root sends the pieces of the largest subtree."""
    weights = _weights(ranks, k)
    largest = max(min(weights[-1], ranks - weights[-1]), *weights[-2:-1], 1)
    return Cost(rounds=len(weights), bytes_sent=Fraction(largest, ranks))


@algorithm(Op.BROADCAST, "k_nomial", cost=broadcast_cost)
def broadcast(ranks: int, root: int, *, k: int = 4) -> Schedule:
    """The root sends to k-1 ranks at multiples of the distance n/k. All these ranks then send at
    multiples of n/k^2, and so on.

    Rounds: ceil(log_k(n)). Bytes: up to (k-1) log_k(n) x N, at the root. Source: Wilkins et al.,
    "Generalized collective algorithms for the exascale era" (2023).
    """
    b = Builder(Collective(op=Op.BROADCAST, ranks=ranks, root=root), "k_nomial")
    for weight in reversed(_weights(ranks, k)):
        for parent, child in _edges(ranks, k, weight):
            b.copy((parent + root) % ranks, 0, (child + root) % ranks)
        b.next_round()
    return b.build()


@algorithm(Op.REDUCE, "k_nomial", cost=reduce_cost)
def reduce(ranks: int, root: int, *, k: int = 4) -> Schedule:
    """Sends partial sums from children to their parents, along the same tree as a broadcast from
    the root.

    Rounds: ceil(log_k(n)). Bytes: N. Reductions: up to (k-1) log_k(n) x N, at the root. Source:
    Wilkins et al. (2023).
    """
    return backwards(broadcast(ranks, root, k=k))


@algorithm(Op.SCATTER, "k_nomial", cost=scatter_cost)
def scatter(ranks: int, root: int, *, k: int = 4) -> Schedule:
    """Each rank sends to each child the pieces for all ranks in the child's subtree. All pieces
    must have the same length.

    Rounds: ceil(log_k(n)). Bytes: (n-1)/n x N at the root. Source: Wilkins et al. (2023).
    """
    b = Builder(Collective(op=Op.SCATTER, ranks=ranks, root=root), "k_nomial")
    for weight in reversed(_weights(ranks, k)):
        for parent, child in _edges(ranks, k, weight):
            for first, count in _subtree(ranks, root, child, weight):
                b.copy((parent + root) % ranks, first, (child + root) % ranks, count=count)
        b.next_round()
    return b.build()


@algorithm(Op.GATHER, "k_nomial", cost=gather_cost)
def gather(ranks: int, root: int, *, k: int = 4) -> Schedule:
    """Each rank sends the pieces of all ranks in its subtree to its parent. All pieces must have
    the same length.

    Rounds: ceil(log_k(n)). Bytes: up to N/2, by a child of the root (N/k if n is a power of k).
    Source: Wilkins et al. (2023).
    """
    return backwards(scatter(ranks, root, k=k))


def _weights(ranks: int, k: int) -> list[int]:
    if k < 2:
        raise UnsupportedError(f"k_nomial: expected k of at least 2, got {k}")
    return powers(k, ranks)


def _children(ranks: int, k: int) -> int:
    """Returns the number of children of the root. No other rank has more children."""
    return sum(min(k - 1, (ranks - 1) // weight) for weight in _weights(ranks, k))


def _edges(ranks: int, k: int, weight: int) -> Iterator[tuple[int, int]]:
    """Yields (parent, child) for each edge of one round, as distances from the root. `weight` is
    the smallest distance between a parent and a child in this round.
    """
    for parent in range(0, ranks, k * weight):
        for child in range(parent + weight, min(parent + k * weight, ranks), weight):
            yield parent, child


def _subtree(ranks: int, root: int, child: int, weight: int) -> Iterator[tuple[int, int]]:
    """Yields (first chunk, count) for the pieces of a child's subtree. Yields two ranges if the
    ranks of the subtree wrap around from the last rank to rank 0.
    """
    count = min(weight, ranks - child)
    first = (child + root) % ranks
    head = min(count, ranks - first)
    yield first, head
    if head < count:
        yield 0, count - head

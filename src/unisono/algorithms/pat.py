"""Parallel aggregated trees: far first, with a bound on what is sent in one round.

As long as a message holds fewer than `aggregation` pieces, rounds are those of a binomial tree,
far first. From there on, the subtrees below are walked depth first, `aggregation` trees at a time,
so that little is under way at any time. A bound of n/2 or more gives the fewest rounds, 1 a round
for each piece. n is the number of ranks, A the bound, N the bytes of the whole vector; bytes are
those a rank sends.
"""

from __future__ import annotations

from unisono.algorithms.compose import backwards, runs
from unisono.algorithms.cost import Cost, of_all_gather
from unisono.algorithms.cost import backwards as backwards_cost
from unisono.algorithms.registry import algorithm
from unisono.errors import UnsupportedError
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _gather_cost(ranks: int, *, aggregation: int = 4) -> Cost:
    far, subtree = _shape(ranks, aggregation)
    return of_all_gather(far + min(subtree, ranks) - 1, ranks - 1, ranks)


def _scatter_cost(ranks: int, *, aggregation: int = 4) -> Cost:
    return backwards_cost(_gather_cost(ranks, aggregation=aggregation), ranks)


@algorithm(Op.ALL_GATHER, "pat", cost=_gather_cost)
def all_gather(ranks: int, *, aggregation: int = 4) -> Schedule:
    """Each piece goes up the binomial tree of its owner; all trees take the same edge at once.

    Rounds: a + s - 1, where A = 2^a and s = ceil(n/A) rounded up to a power of two (and at most
    n). Bytes: (n-1)/n x N. Source: Jeaugey, "PAT: a new algorithm for all-gather and
    reduce-scatter operations at scale" (2025).
    """
    far, subtree = _shape(ranks, aggregation)
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=ranks), "pat")
    for step in range(far):
        distance = subtree << (far - 1 - step)
        _send(b, range(0, ranks, 2 * distance), distance)
    for way in range(1, min(subtree, ranks)):  # depth first: parents come before
        distance = way & -way
        _send(b, range(way - distance, ranks, subtree), distance)
    return b.build()


@algorithm(Op.REDUCE_SCATTER, "pat", cost=_scatter_cost)
def reduce_scatter(ranks: int, *, aggregation: int = 4) -> Schedule:
    """The all-gather backwards.

    Rounds: a + s - 1, as for the all-gather. Bytes: (n-1)/n x N. Reductions: (n-1)/n x N.
    Source: Jeaugey (2025).
    """
    return backwards(all_gather(ranks, aggregation=aggregation))


def _send(b: Builder, ways: range, distance: int) -> None:
    """A round: every rank sends the pieces that have come these ways, `distance` up."""
    ranks = b.collective.ranks
    for rank in range(ranks):
        pieces = [(rank - way) % ranks for way in ways if way + distance < ranks]
        for first, count in runs(pieces):
            b.copy(rank, first, (rank + distance) % ranks, count=count)
    b.next_round()


def _shape(ranks: int, aggregation: int) -> tuple[int, int]:
    """Rounds of the far part, and the size of the subtrees that remain."""
    if aggregation < 1 or aggregation & (aggregation - 1):
        raise UnsupportedError(f"pat: aggregation must be a power of two, not {aggregation}")
    depth = (ranks - 1).bit_length()
    far = min(aggregation.bit_length() - 1, depth)
    return far, 1 << (depth - far)

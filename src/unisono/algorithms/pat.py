"""Parallel aggregated trees (PAT): far distances first, with a limit on the pieces per message.

While messages have fewer than `aggregation` pieces, the algorithm runs the rounds of a binomial
tree, with far distances first. After that, the algorithm visits the remaining subtrees depth first,
`aggregation` trees at a time. So only few data are in transit at any time. A limit of n/2 or more
needs the fewest rounds. A limit of 1 needs one round for each piece. n is the number of ranks and A
the limit. N is the size of the whole vector in bytes. In the docstrings below, "Bytes" is the
number of bytes that a rank sends.
"""

from __future__ import annotations

from unisono.algorithms.cost import Cost, of_all_gather
from unisono.algorithms.cost import backwards as backwards_cost
from unisono.algorithms.registry import algorithm
from unisono.algorithms.schedule_composition import backwards, runs
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
    """Sends each piece along a binomial tree whose root is the piece's owner. The trees of all
    pieces have the same shape, and use corresponding edges at the same time.

    Rounds: a + s - 1, where A = 2^a and s = ceil(n/A) rounded up to a power of two (and at most n).
    Bytes: (n-1)/n x N. Source: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter
    operations at scale" (2025).
    """
    far, subtree = _shape(ranks, aggregation)
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=ranks), "pat")
    for step in range(far):
        distance = subtree << (far - 1 - step)
        _send(b, range(0, ranks, 2 * distance), distance)
    for offset in range(1, min(subtree, ranks)):  # depth first: parents come before children
        distance = offset & -offset
        _send(b, range(offset - distance, ranks, subtree), distance)
    return b.build()


@algorithm(Op.REDUCE_SCATTER, "pat", cost=_scatter_cost)
def reduce_scatter(ranks: int, *, aggregation: int = 4) -> Schedule:
    """Runs the transfers of the all-gather in reverse order and direction.

    Rounds: a + s - 1, as for the all-gather. Bytes: (n-1)/n x N. Reductions: (n-1)/n x N. Source:
    Jeaugey (2025).
    """
    return backwards(all_gather(ranks, aggregation=aggregation))


def _send(b: Builder, offsets: range, distance: int) -> None:
    """Adds a round in which every rank r sends pieces to rank r + `distance`. For each offset in
    `offsets`, rank r sends the piece of rank r - offset, unless offset + `distance` is n or more.
    """
    ranks = b.collective.ranks
    for rank in range(ranks):
        pieces = [(rank - offset) % ranks for offset in offsets if offset + distance < ranks]
        for first, count in runs(pieces):
            b.copy(rank, first, (rank + distance) % ranks, count=count)
    b.next_round()


def _shape(ranks: int, aggregation: int) -> tuple[int, int]:
    """Returns the number of rounds in which messages grow (the first phase), and the size in ranks
    of the subtrees that remain after this phase.
    """
    if aggregation < 1 or aggregation & (aggregation - 1):
        raise UnsupportedError(f"pat: expected a power of two as aggregation, got {aggregation}")
    depth = (ranks - 1).bit_length()
    far = min(aggregation.bit_length() - 1, depth)
    return far, 1 << (depth - far)

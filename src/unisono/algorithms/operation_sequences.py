"""Operations that run two other operations in sequence, with any algorithm for each operation.

`reduce_broadcast:chain` uses `chain` for both operations.
`reduce_broadcast:reduce=chain,broadcast=direct` names an algorithm for each operation. n is the
number of ranks, and N is the size of the whole vector in bytes. In the docstrings below, "Bytes" is
the number of bytes that the busiest rank sends. A cost is the sum of the costs of both operations.
The sum is an upper bound if their busiest ranks differ.
"""

from __future__ import annotations

from unisono.algorithms.cost import Cost
from unisono.algorithms.registry import algorithm, build, cost
from unisono.algorithms.schedule_composition import in_sequence
from unisono.schedule import Schedule
from unisono.types import Op


def _reduce_broadcast_cost(
    ranks: int, *, reduce: str = "binomial_tree", broadcast: str | None = None
) -> Cost:
    return cost(Op.REDUCE, reduce, ranks=ranks) + cost(
        Op.BROADCAST, broadcast or reduce, ranks=ranks
    )


def _halves_cost(
    ranks: int, *, reduce_scatter: str = "bruck", all_gather: str | None = None
) -> Cost:
    return cost(Op.REDUCE_SCATTER, reduce_scatter, ranks=ranks) + cost(
        Op.ALL_GATHER, all_gather or reduce_scatter, ranks=ranks
    )


def _gather_broadcast_cost(
    ranks: int, *, gather: str = "binomial_tree", broadcast: str | None = None
) -> Cost:
    return cost(Op.GATHER, gather, ranks=ranks) + cost(
        Op.BROADCAST, broadcast or gather, ranks=ranks
    )


def _reduce_and_scatter_cost(
    ranks: int, *, reduce: str = "binomial_tree", scatter: str | None = None
) -> Cost:
    return cost(Op.REDUCE, reduce, ranks=ranks) + cost(Op.SCATTER, scatter or reduce, ranks=ranks)


@algorithm(Op.ALL_REDUCE, "reduce_broadcast", cost=_reduce_broadcast_cost, exact=False)
def reduce_broadcast(
    ranks: int, *, reduce: str = "binomial_tree", broadcast: str | None = None
) -> Schedule:
    """Reduces to rank 0, then broadcasts from rank 0.

    Rounds: sum of both. Bytes: at most the sum of both. Reductions: as in the reduce. Source: Chan,
    Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and
    experience" (2007), all-reduce by minimum spanning trees.
    """
    parts = [
        build(Op.REDUCE, reduce, ranks=ranks),
        build(Op.BROADCAST, broadcast or reduce, ranks=ranks),
    ]
    return in_sequence(Op.ALL_REDUCE, parts)


@algorithm(Op.ALL_REDUCE, "reduce_scatter_all_gather", cost=_halves_cost)
def reduce_scatter_all_gather(
    ranks: int, *, reduce_scatter: str = "bruck", all_gather: str | None = None
) -> Schedule:
    """Runs any reduce-scatter algorithm, then any all-gather algorithm.

    Rounds: sum of both. Bytes: sum of both. Reductions: as in the reduce-scatter. Source:
    Rabenseifner, "Optimization of collective reduction operations" (2004).
    """
    parts = [
        build(Op.REDUCE_SCATTER, reduce_scatter, ranks=ranks),
        build(Op.ALL_GATHER, all_gather or reduce_scatter, ranks=ranks),
    ]
    return in_sequence(Op.ALL_REDUCE, parts)


@algorithm(Op.ALL_GATHER, "gather_broadcast", cost=_gather_broadcast_cost, exact=False)
def gather_broadcast(
    ranks: int, *, gather: str = "binomial_tree", broadcast: str | None = None
) -> Schedule:
    """Gathers at rank 0, then broadcasts from rank 0. All pieces must have the same length.

    Rounds: sum of both. Bytes: at most the sum of both. Source: Chan et al. (2007), all-gather by
    minimum spanning trees.
    """
    parts = [
        build(Op.GATHER, gather, ranks=ranks),
        build(Op.BROADCAST, broadcast or gather, ranks=ranks),
    ]
    return in_sequence(Op.ALL_GATHER, parts)


@algorithm(Op.REDUCE_SCATTER, "reduce_and_scatter", cost=_reduce_and_scatter_cost, exact=False)
def reduce_and_scatter(
    ranks: int, *, reduce: str = "binomial_tree", scatter: str | None = None
) -> Schedule:
    """Reduces to rank 0, then scatters from rank 0.

    Rounds: sum of both. Bytes: at most the sum of both. Reductions: as in the reduce. Source: Chan
    et al. (2007), reduce-scatter by minimum spanning trees.
    """
    parts = [
        build(Op.REDUCE, reduce, ranks=ranks),
        build(Op.SCATTER, scatter or reduce, ranks=ranks),
    ]
    return in_sequence(Op.REDUCE_SCATTER, parts)

"""Lists the algorithms of an operation with their costs."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from rich.table import Table
from rich.text import Text

from unisono.algorithms import Cost, cost, describe, find, names
from unisono.errors import UnsupportedError
from unisono.show.chunk_amounts import Scale
from unisono.types import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmCost:
    """One algorithm with its cost. If the algorithm does not support this number of ranks, `cost`
    is None and `problem` has the reason.

    If `exact` is false, the bytes of the cost are an upper bound.
    """

    name: str
    summary: str
    cost: Cost | None
    exact: bool
    problem: str = ""

    def as_dict(self) -> dict[str, object]:
        """Returns the fields as data for JSON; bytes are fractions of N."""
        known = self.cost
        return {
            "name": self.name,
            "summary": self.summary,
            "rounds": None if known is None else known.rounds,
            "bytes_sent": None if known is None else float(known.bytes_sent),
            "exact": self.exact,
            "problem": self.problem,
        }


def choices(op: Op | str, *, ranks: int) -> tuple[AlgorithmCost, ...]:
    """Returns all algorithms of an operation with their costs.

    >>> [choice.name for choice in choices("barrier", ranks=4)]
    ['direct']
    """
    return tuple(_choice(op, name, ranks) for name in names(op))


def table_of(found: tuple[AlgorithmCost, ...], *, nbytes: int | None = None) -> Table:
    """Returns a table with a row for each algorithm. Amounts are in bytes if `nbytes`, the size of
    a rank's larger buffer, is given, else fractions of N.

    >>> table_of(choices("all_reduce", ranks=4)).columns[0].header
    'algorithm'
    """
    grid = Table(show_edge=False, pad_edge=False)
    grid.add_column("algorithm", no_wrap=True)
    grid.add_column("rounds", justify="right", no_wrap=True)
    grid.add_column("a rank sends", justify="right", no_wrap=True)
    grid.add_column("description", ratio=1)
    for choice in found:
        known = choice.cost
        if known is None:
            grid.add_row(choice.name, "", "", Text(choice.problem, style="dim"))
            continue
        sent = ("" if choice.exact else "≤ ") + _amount(known.bytes_sent, nbytes)
        grid.add_row(choice.name, str(known.rounds), sent, Text(choice.summary))
    return grid


def _choice(op: Op | str, name: str, ranks: int) -> AlgorithmCost:
    algorithm, known, problem = find(op, name), None, ""
    try:
        known = cost(op, name, ranks=ranks)
    except UnsupportedError as error:
        problem = str(error)
    return AlgorithmCost(
        name=name,
        summary=describe(algorithm).summary,
        cost=known,
        exact=algorithm.exact,
        problem=problem,
    )


def _amount(share: Fraction, nbytes: int | None) -> str:
    return Scale(chunks=share.denominator, nbytes=nbytes).text(share.numerator)

"""Cost of a schedule, independent of the message size: rounds, bytes sent, bytes reduced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from unisono.schedule import Collective, Schedule
from unisono.types import Op

BY_PART = (Op.ALL_REDUCE, Op.BROADCAST, Op.REDUCE, Op.SCAN, Op.EXSCAN)
"""Operations whose data are one vector per rank. The data of the other operations are one piece per
rank.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of an algorithm, in multiples of N, the size of the whole vector in bytes.

    N is the size of a rank's vector, or the total size of a rank's pieces in operations with one
    piece per rank. `rounds` is the number of rounds with transfers. `bytes_sent` is the amount that
    the busiest rank sends, counted once per receiver. `reductions` is the amount that the busiest
    rank reads from other ranks and reduces. The rank that sends most and the rank that reduces most
    may differ.

    >>> half = Cost(rounds=1, bytes_sent=Fraction(1, 2))
    >>> (half + half).bytes_sent, half.on(Fraction(1, 2)).bytes_sent
    (Fraction(1, 1), Fraction(1, 4))
    """

    rounds: int
    bytes_sent: Fraction
    reductions: Fraction = Fraction(0)

    def __add__(self, after: Cost) -> Cost:
        """Returns the cost of two schedules in sequence. The cost is an upper bound if their
        busiest ranks differ.
        """
        return Cost(
            rounds=self.rounds + after.rounds,
            bytes_sent=self.bytes_sent + after.bytes_sent,
            reductions=self.reductions + after.reductions,
        )

    def on(self, share: Fraction) -> Cost:
        """Returns the cost of the same algorithm for a share of the vector."""
        return Cost(
            rounds=self.rounds,
            bytes_sent=self.bytes_sent * share,
            reductions=self.reductions * share,
        )


FREE = Cost(rounds=0, bytes_sent=Fraction(0))
"""Cost of any operation for a single rank."""


def largest(costs: Iterable[Cost]) -> Cost:
    """Returns the cost of schedules that run in parallel: the maximum of each component."""
    each = list(costs)
    return Cost(
        rounds=max(one.rounds for one in each),
        bytes_sent=max(one.bytes_sent for one in each),
        reductions=max(one.reductions for one in each),
    )


def of_all_gather(rounds: int, chunks: int, ranks: int) -> Cost:
    """Returns the cost of an all-gather in which the busiest of `ranks` ranks sends `chunks`
    pieces.
    """
    return Cost(rounds=rounds, bytes_sent=Fraction(chunks, ranks))


def backwards(gather: Cost, ranks: int) -> Cost:
    """Returns the cost of the reduce-scatter that runs this all-gather in reverse.

    A rank reduces as many bytes as it sends in the all-gather. A rank sends as many bytes as it
    receives in the all-gather: all pieces except its own.
    """
    sent = Fraction(ranks - 1, ranks)
    return Cost(rounds=gather.rounds, bytes_sent=sent, reductions=gather.bytes_sent)


def scatter_then_gather(gather: Cost, ranks: int) -> Cost:
    """Returns the cost of an all-reduce: this all-gather in reverse, then this all-gather."""
    return backwards(gather, ranks) + gather


def whole_chunks(collective: Collective) -> int:
    """Returns the number of chunks in the whole vector (N bytes).

    >>> whole_chunks(Collective(op=Op.ALL_GATHER, ranks=4))
    4
    """
    return collective.parts * (1 if collective.op in BY_PART else collective.ranks)


def measure(schedule: Schedule) -> Cost:
    """Counts the cost of a schedule, transfer by transfer.

    >>> from unisono.algorithms import build
    >>> cost = measure(build("all_reduce", "ring", ranks=4))
    >>> cost.rounds, cost.bytes_sent, cost.reductions
    (6, Fraction(3, 2), Fraction(3, 4))
    """
    whole = whole_chunks(schedule.collective)
    columns = schedule.columns
    moves = columns.src != columns.dst
    reduces = moves & columns.reduce
    sent = np.bincount(columns.src[moves], columns.count[moves], minlength=1)
    reduced = np.bincount(columns.dst[reduces], columns.count[reduces], minlength=1)
    return Cost(
        rounds=len(np.unique(columns.round)),
        bytes_sent=Fraction(int(sent.max()), whole),
        reductions=Fraction(int(reduced.max()), whole),
    )

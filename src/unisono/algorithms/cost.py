"""What a schedule costs, free of message size: rounds, bytes sent, bytes reduced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from unisono.schedule import Collective, Schedule
from unisono.types import Op

BY_PART = (Op.ALL_REDUCE, Op.BROADCAST, Op.REDUCE, Op.SCAN, Op.EXSCAN)
"""Operations on one vector a rank; the others have a piece for each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What an algorithm takes, as multiples of N: the bytes of the whole vector.

    N is a rank's vector, or all its pieces together. `rounds` are those in which something moves.
    `bytes_sent` is what the busiest rank sends, counted once per receiver; `reductions` is what the
    busiest rank reads of other ranks to reduce it. These may be two different ranks.

    >>> half = Cost(rounds=1, bytes_sent=Fraction(1, 2))
    >>> (half + half).bytes_sent, half.on(Fraction(1, 2)).bytes_sent
    (Fraction(1, 1), Fraction(1, 4))
    """

    rounds: int
    bytes_sent: Fraction
    reductions: Fraction = Fraction(0)

    def __add__(self, after: Cost) -> Cost:
        """One after the other, by ranks that are the busiest in both: at most this."""
        return Cost(
            rounds=self.rounds + after.rounds,
            bytes_sent=self.bytes_sent + after.bytes_sent,
            reductions=self.reductions + after.reductions,
        )

    def on(self, share: Fraction) -> Cost:
        """The cost of doing the same to a share of the vector."""
        return Cost(
            rounds=self.rounds,
            bytes_sent=self.bytes_sent * share,
            reductions=self.reductions * share,
        )


FREE = Cost(rounds=0, bytes_sent=Fraction(0))
"""What any operation costs a single rank."""


def largest(costs: Iterable[Cost]) -> Cost:
    """Side by side: the most of each."""
    each = list(costs)
    return Cost(
        rounds=max(one.rounds for one in each),
        bytes_sent=max(one.bytes_sent for one in each),
        reductions=max(one.reductions for one in each),
    )


def of_all_gather(rounds: int, chunks: int, ranks: int) -> Cost:
    """An all-gather whose busiest rank sends `chunks` pieces."""
    return Cost(rounds=rounds, bytes_sent=Fraction(chunks, ranks))


def backwards(gather: Cost, ranks: int) -> Cost:
    """The reduce-scatter that is this all-gather backwards.

    What a rank sent is what it now reduces, and each rank sends what it once received: all the
    pieces but its own.
    """
    sent = Fraction(ranks - 1, ranks)
    return Cost(rounds=gather.rounds, bytes_sent=sent, reductions=gather.bytes_sent)


def there_and_back(gather: Cost, ranks: int) -> Cost:
    """The all-reduce that is this all-gather backwards, then forwards."""
    return backwards(gather, ranks) + gather


def whole_chunks(collective: Collective) -> int:
    """The chunks that make up N.

    >>> whole_chunks(Collective(op=Op.ALL_GATHER, ranks=4))
    4
    """
    return collective.parts * (1 if collective.op in BY_PART else collective.ranks)


def measure(schedule: Schedule) -> Cost:
    """What the schedule really does, counted transfer by transfer.

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
